"""An episode that was cut off goes on where it stopped, with the turns it had."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from nestling.agent.demonstrator import Demonstrator
from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.policies.scripted import scripted
from nestling.agent.policy import AgentTurn, Policy
from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import TokenPolicy
from nestling.agent.turn_log import RecordedTurn, storable
from nestling.core.errors import StoreError
from nestling.engine.chat import render_call
from nestling.engine.tokenizer import Tokenizer
from nestling.families.registry import get
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP, TASKSET_PATH


class CutError(Exception):
    """The process ends here."""


@dataclass(slots=True)
class ListLog:
    """Satisfies `TurnLog` in memory; `cut` turns can be written, then the process ends."""

    turns: list[RecordedTurn] = field(default_factory=list)
    cut: int = 1_000
    writes: int = 0

    async def recorded(self) -> list[RecordedTurn]:
        return list(self.turns)

    async def record(self, number: int, turn: AgentTurn, answer_before: str | None) -> None:
        if self.writes == self.cut:
            raise CutError
        self.writes += 1
        del self.turns[number:]
        if number:
            self.turns[-1] = replace(self.turns[-1], answer=answer_before)
        self.turns.append(RecordedTurn(turn=replace(turn, text=storable(turn.text))))


TASK = EpisodeTask(family=get("ledger"), task_id="t", task_seed=1, policy_seed=2)
PROMPT = AgentPrompt(system="s", user="u", tool_schemas=(), style="compact", family="ledger")
WORDS = Tokenizer.closed(
    [
        *["get_baseline_scores", "list_files", "read_file", "write_file", "submit_job", "job.toml"],
        *["<tool_call>", "</tool_call>", '":', "{", "}", "ok", "error", "accepted"],
        *(RANGE_GAP, REWARDS_GAP, TASKSET_PATH, "\n", " "),
    ]
)
CALLS = [
    render_call("list_files", {}),
    render_call("get_baseline_scores", {}),
    render_call("read_file", {"path": "job.toml"}),
    render_call("submit_job", {}),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(slots=True)
class Caller:
    """Mostly calls a tool, drawn by the turn's seed; counts what it samples."""

    seeds: list[int] = field(default_factory=list)

    async def sample(
        self, ids: Sequence[int], *, session: str, seed: int, max_tokens: int, temperature: float
    ) -> Sampled:
        self.seeds.append(seed)
        rng = random.Random(f"{seed} {list(ids)}")
        whole = [*WORDS.encode(rng.choice([*CALLS, "<tool_call>{"])), WORDS.turn_end_id]
        said = whole[: min(max_tokens, rng.choice((10, 1_000)))]
        return Sampled(
            ids=said,
            logprobs=[-rng.random() for _ in said],
            stopped=len(said) == len(whole),
        )


def token_policy(sampler: Caller) -> TokenPolicy:
    return TokenPolicy(
        tokenizer=WORDS, sampler=sampler, max_turn_tokens=400, max_total_tokens=40_000
    )


async def play(policy: Policy, runner: Any, log: ListLog | None = None) -> dict[str, Any]:
    result = await run_episode(TASK, policy, runner, turn_log=log)
    return result.model_dump(exclude={"seconds"})


@pytest.mark.parametrize("name", ["noop", "oracle", "template", "random", "demonstrator"])
async def test_policies_without_tokens_replay_by_text(name: str, make_runner: Any) -> None:
    def policy() -> Policy:
        return Demonstrator() if name == "demonstrator" else scripted(name)

    calm = await play(policy(), make_runner())
    for cut in range(calm["num_turns"]):
        log = ListLog(cut=cut)
        with pytest.raises(CutError):
            await play(policy(), make_runner(), log)
        assert len(log.turns) == cut
        log.cut = 1_000
        assert await play(policy(), make_runner(), log) == calm
        assert log.writes == len(log.turns) == calm["num_turns"]


async def test_recorded_turns_are_never_sampled_again(make_runner: Any) -> None:
    whole = Caller()
    calm = await play(token_policy(whole), make_runner())
    turns = calm["num_turns"]
    assert turns == len(whole.seeds) > 3
    for cut in range(turns + 1):
        log, first, second = ListLog(cut=cut), Caller(), Caller()
        if cut < turns:
            with pytest.raises(CutError):
                await play(token_policy(first), make_runner(), log)
            log.cut = 1_000
        else:  # the process ends between the last turn and the reward
            await play(token_policy(first), make_runner(), log)
        assert await play(token_policy(second), make_runner(), log) == calm
        assert second.seeds == whole.seeds[cut:]


async def test_many_cuts_in_one_episode(make_runner: Any) -> None:
    calm = await play(token_policy(Caller()), make_runner())
    log, sampler, result = ListLog(cut=0), Caller(), None
    while result is None:
        log.cut, log.writes = 1, 0
        try:
            result = await play(token_policy(sampler), make_runner(), log)
        except CutError:
            continue
    assert result == calm
    # The turn that could not be written is the only one sampled twice, once per cut.
    assert len(sampler.seeds) == 2 * calm["num_turns"] - 1


async def test_another_answer_forgets_what_was_said_after_it(make_runner: Any) -> None:
    log, asked = ListLog(), Caller()
    before = await play(token_policy(asked), make_runner(), log)
    place = next(
        index for index, one in enumerate(log.turns) if "get_baseline_scores" in one.turn.text
    )
    assert place < before["num_turns"] - 1

    class Improved(make_runner):  # type: ignore[misc]
        async def baselines(self, family: str) -> dict[str, float]:
            return {"nano": 0.9}

    again = Caller()
    result = await play(token_policy(again), Improved(), log)
    assert again.seeds[0] == asked.seeds[place + 1]
    assert result == await play(token_policy(Caller()), Improved())
    assert log.turns[place].answer == "best: nano\nnano 0.90"
    assert len(log.turns) == result["num_turns"]


@pytest.mark.parametrize(
    "damage",
    [
        {"text": "other words"},
        {"ids": (10**6,)},
        {"ids": ()},
        {"ids": (1,) * 500, "logprobs": (0.0,) * 500},
    ],
)
async def test_turn_that_the_session_could_not_have_said_is_sampled(
    damage: dict[str, Any], make_runner: Any
) -> None:
    log, asked, again = ListLog(), Caller(), Caller()
    calm = await play(token_policy(asked), make_runner(), log)
    log.turns[1] = replace(log.turns[1], turn=replace(log.turns[1].turn, **damage))
    assert await play(token_policy(again), make_runner(), log) == calm
    assert again.seeds == asked.seeds[1:]


async def test_changed_script_goes_on_with_its_own_turn(make_runner: Any) -> None:
    log = ListLog()
    await play(scripted("template"), make_runner(), log)
    assert await play(scripted("oracle"), make_runner(), log) == await play(
        scripted("oracle"), make_runner()
    )


async def test_text_that_utf8_cannot_hold_is_replayed_exactly(make_runner: Any) -> None:
    path = "data/\ud800.json"

    class Odd:
        def begin(self, prompt: AgentPrompt, seed: int) -> Any:
            def turns() -> Any:
                yield f"\ud800{render_call('read_file', {'path': path})}"
                yield "\ud800 bye"

            from nestling.agent.policies.scripted import ScriptedPolicy

            policy = ScriptedPolicy(name="odd", script=lambda *_: turns())
            return policy.begin(prompt, seed)

    log = ListLog(cut=1)
    with pytest.raises(CutError):
        await play(Odd(), make_runner(), log)
    log.cut = 2
    assert await play(Odd(), make_runner(), log) == await play(Odd(), make_runner())


async def test_log_that_fails_stops_the_run(make_runner: Any) -> None:
    class Full(ListLog):
        async def record(self, number: int, turn: AgentTurn, answer_before: str | None) -> None:
            raise StoreError("the disk is full")

    with pytest.raises(StoreError):
        await play(scripted("template"), make_runner(), Full())


async def test_closed_session_replays_nothing() -> None:
    session = token_policy(Caller()).begin(PROMPT, 1)
    turn = await session.act()
    session.close()
    assert await session.replay(turn) is None
