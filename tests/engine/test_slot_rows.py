import numpy as np
import pytest
import torch

from nestling.engine.cpu_decoder import CpuDecoder
from nestling.engine.cpu_step import CpuStep
from nestling.engine.decoder import row_uniforms
from nestling.engine.model import Model
from nestling.engine.sampler import Rollout, SamplingParams, TurnEnd, play
from nestling.engine.slot_rows import SlotRows

from .conftest import make_model

PROMPT = [5, 6, 7, 8, 9, 10]


def started(*groups: tuple[int, ...]) -> SlotRows:
    rows = SlotRows(sum(map(len, groups)))
    for group in groups:
        for slot in group:
            rows.begin(slot)
        rows.place(np.array(group[:1]))
        rows.join(np.array(group))
    return rows


def test_slots_part_when_their_labels_differ() -> None:
    rows = started((0, 1, 2, 3), (4, 5))
    assert rows.row.tolist() == [0, 0, 0, 0, 1, 1]
    copies = rows.split(np.arange(6), np.array([8, 7, 8, 9, 7, 7]))
    assert copies == ([0, 0], [2, 3])
    assert rows.row.tolist() == [2, 0, 2, 3, 1, 1]
    assert rows.split(np.arange(6), np.array([1, 2, 1, 3, 4, 4])) == ([], [])
    assert rows.num_rows == 4


def test_rows_of_ended_sequences_are_used_again() -> None:
    rows = started((0,), (1, 2), (3,))
    rows.release(np.array([0]))
    assert rows.open().tolist() == [1, 2, 3]
    assert rows.split(np.array([1, 2, 3]), np.array([5, 6, 7])) == ([1], [0])
    assert rows.row.tolist() == [-2, 1, 0, 2]
    rows.begin(0)
    assert rows.place(np.array([0])).tolist() == [3]


def test_rows_in_use_move_to_the_front() -> None:
    rows = started(*((slot,) for slot in range(5)))
    assert rows.close_gaps() == ([], [])
    rows.release(np.array([1, 2]))
    assert rows.close_gaps() == ([3, 4], [1, 2])
    assert rows.row.tolist() == [0, -2, -2, 1, 2]
    assert rows.num_rows == 3


def rolled(model: Model, groups: int, size: int, max_rows: int) -> tuple[list[Rollout], int]:
    """Groups whose answers depend on the row, not on what it said; and the positions computed."""
    computed = 0
    decode = CpuStep.decode

    def counted(self: CpuStep, token: torch.Tensor, *rest: object) -> torch.Tensor:
        nonlocal computed
        computed += len(token)
        return decode(self, token, *rest)  # type: ignore[arg-type]

    def answer(turns: list[TurnEnd]) -> list[list[int] | None]:
        return [[11 + turn.row % 2] * (1 + turn.row % 3 * 9) for turn in turns]

    prompts = [[*PROMPT, 12 + group] for group in range(groups) for _ in range(size)]
    seeds = [row // 2 for row in range(len(prompts))]  # pairs say the same until an answer differs
    params = SamplingParams(max_turn_tokens=5, max_total_tokens=60, max_turns=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuStep, "decode", counted)
        found = play(model, prompts, seeds, params, answer, max_rows=max_rows)
    return found, computed


@pytest.mark.long
def test_shared_rows_say_what_rows_alone_would() -> None:
    model = make_model()
    together, computed = rolled(model, groups=3, size=8, max_rows=24)
    alone, computed_alone = rolled(model, groups=3, size=8, max_rows=1)
    refilled, _ = rolled(model, groups=3, size=8, max_rows=5)
    assert computed < computed_alone
    for ours, others, expected in zip(together, refilled, alone, strict=True):
        assert ours.ids == others.ids == expected.ids
        for one in (ours, others):
            gap = np.array(one.logprobs) - np.array(expected.logprobs)
            assert np.abs(gap).max() < 1e-5


def test_what_is_appended_to_one_slot_is_not_seen_by_others() -> None:
    """Two slots of one prompt: one is extended, one is extended otherwise, one goes on by itself."""
    model = make_model()
    assert CpuStep.fits(model.params(), model.config)

    def decoder() -> CpuDecoder:
        made = CpuDecoder(model.params(), model.config, num_slots=3, max_len=40, temperature=1.0)
        for slot in range(3):
            made.set_uniforms(slot, row_uniforms(slot, 40))
        return made

    start, first = np.zeros((1, 1), np.int64), np.array([PROMPT])[None]
    more = np.array([[[11, 12, 13], [13, 12, 11]]])
    shared, apart = decoder(), decoder()
    shared.extend(first, start, np.array([[0]]))
    shared.share([[0, 1, 2]], [len(PROMPT)])
    for slot in range(3):
        apart.extend(first, start, np.array([[slot]]))
    for one in (shared, apart):
        one.extend(more, np.full((1, 2), len(PROMPT)), np.array([[0, 2]]))
    token, position = np.array([7, 8, 7]), len(PROMPT) + np.array([3, 0, 3])
    for _ in range(3):
        ours, theirs = (
            one.step(token, position, int(position.max()) + 1) for one in (shared, apart)
        )
        assert ours[0].tolist() == theirs[0].tolist()
        assert np.abs(ours[1] - theirs[1]).max() < 1e-5
        token, position = ours[0], position + 1
