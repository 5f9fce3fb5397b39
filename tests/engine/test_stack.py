from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling.core.errors import ConfigError
from nestling.engine.batching import TrainRow
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.lane_decoder import LaneDecoder, LanePlan
from nestling.engine.learn import (
    AdamW,
    Dppo,
    Ipo,
    LoraConfig,
    Muon,
    PolicyTrainer,
    SignSgd,
)
from nestling.engine.sampler import SamplingParams, TurnEnd, play
from nestling.engine.stack import Stack
from nestling.engine.stack_plan import StackShape
from nestling.engine.stack_play import STOPS, Played
from nestling.engine.stack_train import (
    JobSettings,
    PlayedRows,
    StackedJob,
    TilePlan,
    Update,
    launch_gradients,
    train_jobs,
)
from nestling.engine.weights import Weights, num_parameters

from .conftest import make_config, make_model
from .stack_script import PARAMS, PROMPTS, Script, new_stack, reply, run

ADAMW = JobSettings(loss=Dppo(), optim=AdamW(lr=1e-3))
OTHERS = (
    JobSettings(loss=Ipo(), optim=Muon(lr=1e-3)),
    JobSettings(loss=Dppo(kl_tau=0.1), optim=AdamW(lr=1e-3), lora=LoraConfig(rank=2, dropout=0.1)),
    JobSettings(loss=Dppo(), optim=SignSgd(lr=1e-3), lora=LoraConfig(rank=3)),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(folder, make_model(seed=3))
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Script]:
    made: list[Script] = []

    def make(settings: JobSettings = ADAMW, **changes: object) -> Script:
        made.append(Script(settings=settings, folder=tmp_path / str(len(made)), **changes))
        return made[-1]

    return make


def stack(base: Path, **changes: object) -> Stack:
    return new_stack(base, make_config(), **changes)


def answer(turns: list[TurnEnd]) -> list[list[int] | None]:
    return [reply(turn.ids) for turn in turns]


def same(a: Played, b: Played) -> bool:
    names = ("ids", "sampled", "logprobs", "lengths", "prompt_lengths", "turns", "stops")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def assert_same_bits(a: Script, b: Script) -> None:
    assert len(a.played) == len(b.played) == a.rounds
    assert all(same(x, y) for x, y in zip(a.played, b.played, strict=True))
    assert a.trained == b.trained
    assert a.saved is not None
    assert a.saved == b.saved


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "params", [PARAMS, SamplingParams(temperature=0.0, max_turn_tokens=5, max_total_tokens=33)]
)
def test_rollouts_are_those_of_the_sampler(
    base: Path, script: Callable[..., Script], together: bool, params: SamplingParams
) -> None:
    one = script(rounds=1, params=params, prompts=[*PROMPTS, [5] * 60])
    run(stack(base, together=together), [one, script(seed=5), script(seed=6)])
    found = one.played[0]
    wanted = play(load_model(base), one.prompts, range(len(one.prompts)), params, answer)
    for n, rollout in enumerate(wanted):
        length = found.lengths[n]
        assert found.ids[n, :length].tolist() == rollout.ids
        assert found.sampled[n, :length].tolist() == rollout.sampled
        assert found.logprobs[n, :length] == pytest.approx(rollout.logprobs, abs=2e-5)
        assert STOPS[found.stops[n]] == rollout.stop
        assert found.turns[n] == rollout.num_turns
        assert found.prompt_lengths[n] == rollout.prompt_len


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ADAMW, id="full"),
        pytest.param(OTHERS[1], id="adapters with dropout", marks=pytest.mark.long),
    ],
)
def test_job_has_the_same_bits_alone_beside_others_late_and_with_slow_tools(
    base: Path, script: Callable[..., Script], settings: JobSettings
) -> None:
    alone = script(settings, learn_observations=settings is ADAMW)
    run(stack(base), [alone])
    assert alone.trained[0].step.updated
    assert alone.trained[0].loss.num_tokens > 0

    beside = script(settings, learn_observations=settings is ADAMW, delay=5)
    others = [script(one, seed=i + 1, prompts=PROMPTS[i:], lr=1e-2) for i, one in enumerate(OTHERS)]
    run(stack(base), [*others, beside], late=[3])
    assert_same_bits(alone, beside)

    short = script(settings, learn_observations=settings is ADAMW)
    run(stack(base, lanes=1), [script(OTHERS[0], seed=9), short])
    assert_same_bits(alone, short)  # also when the two must take turns in one lane


@pytest.mark.long
def test_fault_of_a_job_is_its_end_and_nobody_elses(
    base: Path, script: Callable[..., Script]
) -> None:
    def odd_token(stack: Stack, number: int) -> None:
        stack.answer(number, np.array([0]), np.array([1]), np.array([10**6]))

    def nothing_asked(stack: Stack, number: int) -> None:
        stack.answer(number, np.array([99]), np.array([-1]), np.array([], np.int64))

    def gone(stack: Stack, number: int) -> None:
        stack.leave(number)

    alone = script()
    run(stack(base), [alone])
    for fault, reason in (
        ({"break_at": odd_token}, "stack.protocol"),
        ({"break_at": nothing_asked}, "stack.protocol"),
        ({"params": SamplingParams(max_total_tokens=65)}, "stack.too_long"),
    ):
        beside, bad = script(), script(seed=1, **fault)
        run(stack(base), [bad, beside])
        assert bad.failed is not None
        assert bad.failed.reason == reason
        assert_same_bits(alone, beside)

    beside, diverging = script(), script(seed=1, lr=float("nan"), rounds=3)
    run(stack(base), [diverging, beside])
    assert [one.step.updated for one in diverging.trained] == [True, False, False]
    assert diverging.saved is not None
    assert not diverging.saved.is_finite
    assert not diverging.folder.exists()
    assert_same_bits(alone, beside)

    beside, left = script(), script(seed=1, break_at=gone)
    place = stack(base)
    left.begin(place, 1)
    for _ in range(30):
        for event in place.advance():
            left.take(place, 1, event)
        left.tick(place, 1)
    assert place.num_jobs == 0
    run(place, [beside])
    assert_same_bits(alone, beside)


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
def test_what_a_diverged_job_leaves_in_a_lane_does_not_reach_the_next(
    base: Path, script: Callable[..., Script], together: bool
) -> None:
    alone, after = script(rounds=1), script(rounds=1)
    run(stack(base, lanes=1, together=together), [alone])
    place = stack(base, lanes=1, together=together)
    wild = np.full(num_parameters(make_config()), np.nan, np.float32)
    place.join_weights(0, wild)
    bad = script(prompts=[[5] * 50] * 6)
    bad._train = lambda stack, number, played: stack.leave(number)
    while not bad.played:
        for event in place.advance():
            bad.take(place, 0, event)
        bad.tick(place, 0)
    assert not np.isfinite(bad.played[0].logprobs).all()
    run(place, [after])
    assert_same_bits(alone, after)


def test_training_is_that_of_a_lone_trainer(base: Path, script: Callable[..., Script]) -> None:
    one = script(rounds=1)
    run(stack(base), [one])
    model, played = load_model(base), one.played[0]
    score = (played.lengths % 5).astype(np.float32)
    advantages = score - score.mean()
    advantages[::6] = 0.0
    rows = [
        TrainRow(
            ids=played.ids[n, : played.lengths[n]].tolist(),
            sampled=played.sampled[n, : played.lengths[n]].tolist(),
            logprobs=played.logprobs[n, : played.lengths[n]].tolist(),
            advantage=float(advantages[n]),
        )
        for n in range(len(advantages))
    ]
    trainer = PolicyTrainer(model, ADAMW.loss, ADAMW.optim)
    loss, step = trainer.forward_backward(rows, 1.0), trainer.optim_step(one.lr)
    ours = one.trained[0]
    assert (ours.loss.num_rows, ours.loss.num_tokens) == (loss.num_rows, loss.num_tokens)
    assert ours.loss.loss == pytest.approx(loss.loss, abs=1e-5)
    assert ours.loss.mean_logp == pytest.approx(loss.mean_logp, abs=1e-5)
    assert ours.loss.max_abs_logp_diff < 1e-4
    assert ours.loss.mean_abs_ratio_minus_1 < 1e-4
    assert ours.step.grad_norm == pytest.approx(step.grad_norm, rel=1e-4)
    trained = load_model(one.folder).weights.flat
    moved = (model.weights.flat - load_model(base).weights.flat).norm()
    assert float((trained - model.weights.flat).norm()) < 0.02 * float(moved)


@pytest.mark.long
def test_jobs_computed_together_agree_with_jobs_computed_one_by_one(
    base: Path, script: Callable[..., Script]
) -> None:
    settings = [ADAMW, *OTHERS, ADAMW, JobSettings(loss=Ipo(), optim=AdamW(lr=1e-3))]
    apart = [script(one, seed=i, rounds=1) for i, one in enumerate(settings)]
    run(stack(base), apart)
    near = [script(one, seed=i, rounds=1) for i, one in enumerate(settings)]
    run(stack(base, together=True), near)
    for a, b in zip(apart, near, strict=True):
        assert np.array_equal(a.played[0].ids, b.played[0].ids)
        assert np.abs(a.played[0].logprobs - b.played[0].logprobs).max() < 2e-5
        if a.settings.lora is None or a.settings.lora.dropout == 0:
            assert b.trained[0].step.grad_norm == pytest.approx(
                a.trained[0].step.grad_norm, rel=1e-3
            )
        assert b.trained[0].loss.loss == pytest.approx(a.trained[0].loss.loss, abs=1e-4)


@pytest.mark.long
def test_jobs_wait_for_room_and_one_that_never_fits_is_told_what_to_change(
    base: Path, script: Callable[..., Script]
) -> None:
    shape = StackShape(config=make_config(), num_lanes=1, num_rows=6, max_len=64, tile_tokens=2048)
    place = stack(base, lanes=1, budget=shape.total_bytes(1, 0))
    assert place.num_lanes == 1
    scripts = [script(seed=i, rounds=1) for i in range(3)]
    run(place, scripts)  # there is room for one at a time
    assert all(one.saved is not None for one in scripts)
    assert place.free == shape.job_bytes("adamw")

    place = stack(base, lanes=1, budget=shape.total_bytes(1, 0))
    big = script(JobSettings(loss=Dppo(), optim=AdamW(lr=1e-3), lora=LoraConfig(rank=64)))
    run(place, [big])
    assert big.failed.reason == "stack.out_of_memory"
    assert "lora_rank" in big.failed.detail
    assert place.num_jobs == 0
    with pytest.raises(ConfigError, match=r"inner\.stack\.rows_per_job"):
        stack(base, budget=shape.total_bytes(1, 0) - 1)


@pytest.mark.long
def test_memory_that_runs_out_in_a_step_costs_time_or_one_job(
    base: Path, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = [script(seed=i, rounds=1) for i in range(3)]
    run(stack(base, together=True), apart)
    sizes: list[int] = []

    def small_device(jobs: list[StackedJob], *rest: Any) -> object:
        sizes.append(len(jobs))
        if len(jobs) > 1 or jobs[0].settings.seed == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train_jobs(jobs, *rest)

    monkeypatch.setattr("nestling.engine.stack.train_jobs", small_device)
    near = [script(seed=i, rounds=1) for i in range(3)]
    greedy = script(JobSettings(loss=Dppo(), optim=AdamW(lr=1e-3), seed=7), seed=3)
    run(stack(base, together=True), [*near, greedy])
    assert max(sizes) > 1
    assert greedy.failed.reason == "stack.out_of_memory"
    assert "inner.stack.tile_tokens" in greedy.failed.detail
    assert [one.saved is not None for one in near] == [True] * 3
    for a, b in zip(apart, near, strict=True):
        assert b.trained[0].step.grad_norm == pytest.approx(a.trained[0].step.grad_norm, rel=1e-3)


@pytest.mark.parametrize("call", [1, 2], ids=["before a play", "while saving"])
def test_memory_that_runs_out_between_steps_costs_one_job(
    base: Path, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    merged, calls = StackedJob.merged, []

    def small_device(job: StackedJob) -> Weights:
        if job.settings.seed == 7:
            calls.append(job)
            if len(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return merged(job)

    monkeypatch.setattr(StackedJob, "merged", small_device)
    near = script(seed=0, rounds=1)
    greedy = script(JobSettings(loss=Dppo(), optim=AdamW(lr=1e-3), seed=7), seed=1, rounds=1)
    place = stack(base)
    run(place, [near, greedy])
    assert greedy.failed.reason == "stack.out_of_memory"
    assert near.saved is not None
    assert place.num_jobs == 0


def test_folder_that_cannot_be_written_is_an_error_of_the_system(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written"):
        save_model(tmp_path, load_model(base))


def test_weights_that_are_only_played_need_no_training(
    base: Path, script: Callable[..., Script]
) -> None:
    one = script(rounds=1)
    place = stack(base)
    weights = Weights.init(make_config(), 1, torch.Generator().manual_seed(8))
    one.begin = lambda stack, number: stack.join_weights(number, weights.flat[0].numpy())
    one._train = lambda stack, number, played: stack.save(number, one.folder)
    run(place, [one])
    assert one.failed.detail == "this job trains nothing"
    model = load_model(base)
    model.weights.flat.copy_(weights.flat)
    wanted = play(model, one.prompts, range(len(one.prompts)), PARAMS, answer)
    found = one.played[0]
    assert [found.ids[n, : found.lengths[n]].tolist() for n in range(len(wanted))] == [
        rollout.ids for rollout in wanted
    ]


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_a_step_is_on_another_device(
    lora: LoraConfig | None, dtype: torch.dtype
) -> None:
    # "meta" tensors have shapes and a device but no numbers, and do not mix with those of the CPU: what
    # passes here moves every tensor to its device, as a GPU needs it.
    config, device = make_config(), torch.device("meta")
    plan = LanePlan(lanes_per_launch=2, in_lockstep=False)
    decoder = LaneDecoder(
        config, 3, num_lanes=2, num_rows=3, max_len=64, device=device, dtype=dtype, plan=plan
    )
    decoder.load(1, torch.empty(1, num_parameters(config), device=device), 64)
    for greedy in (False, True):
        decoder._step(0, 2, 64, greedy)
    base = Weights(config, torch.empty(1, num_parameters(config), device=device))
    jobs = [
        StackedJob(
            base,
            make_model().tokenizer,
            JobSettings(loss=loss, optim=AdamW(lr=1), lora=lora),
            device,
        )
        for loss in (Dppo(), Ipo(), Dppo(kl_tau=0.1))
    ]
    updates = [_update(rows, length) for rows, length in ((3, 20), (6, 40), (1, 70))]
    plan = TilePlan(rows=2, jobs_per_launch=8, tokens_per_launch=300)
    grad, _, counts = launch_gradients(jobs, updates, plan, dtype)
    assert (grad.device, grad.dtype, grad.shape[0]) == (device, torch.float32, 3)
    assert counts == [(3, 30), (6, 120), (1, 35)]


def test_few_jobs_have_tall_tiles_where_launches_are_shared() -> None:
    shared = TilePlan(rows=8, jobs_per_launch=8, tokens_per_launch=8192)
    assert [shared.height(jobs, 128) for jobs in (1, 2, 4, 8, 40)] == [64, 32, 16, 8, 8]
    assert shared.height(1, 16) == 128, "no taller than a batch"
    assert TilePlan(rows=8, tokens_per_launch=8192).height(1, 16) == 8, "alone, always the same"


def _update(rows: int, length: int) -> Update:
    sampled = np.zeros((rows, length), bool)
    sampled[:, length // 2 :] = True
    played = PlayedRows(
        ids=np.full((rows, length), 5),
        sampled=sampled,
        logprobs=np.zeros((rows, length), np.float32),
        lengths=np.full(rows, length),
    )
    advantages = np.ones(rows, np.float32)
    return Update(rows=played, advantages=advantages, ce_weights=None, temperature=1.0, lr=1e-3)
