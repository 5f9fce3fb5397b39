"""Episodes end for every reason there is, with a record, whatever the agent says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.agent.episode import EpisodeEvent, EpisodeLimits, EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policies.scripted import scripted
from nestling.agent.policy import AgentTurn, ContextFullError, Trajectory
from nestling.agent.prompt import AgentPrompt, PromptRules
from nestling.agent.token_policy import TokenPolicy
from nestling.agent.tools import ToolLimits
from nestling.agent.workspace import WorkspaceLimits
from nestling.core.errors import FleetError, LearnerError
from nestling.engine.chat import render_call
from nestling.engine.tokenizer import Tokenizer
from nestling.families.registry import get
from nestling.jobs.outcome import Outcome

SUBMIT = render_call("submit_job", {})
LIST = render_call("list_files", {})


@dataclass(slots=True)
class Lines:
    """Says the given turns, then the last one for ever; a turn may be an exception or a wait."""

    turns: Sequence[str | Exception | float]
    sessions: list[_LinesSession] = field(default_factory=list)

    def begin(self, prompt: AgentPrompt, seed: int) -> _LinesSession:
        self.sessions.append(_LinesSession(list(self.turns)))
        return self.sessions[-1]


class _LinesSession:
    def __init__(self, turns: list[str | Exception | float]) -> None:
        self.turns = turns
        self.heard: list[str] = []
        self.closed = 0

    async def act(self) -> AgentTurn:
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, float):
            await asyncio.sleep(turn)
            turn = "late"
        return AgentTurn(text=turn)

    async def observe(self, tool_result: str) -> None:
        self.heard.append(tool_result)

    def close(self) -> None:
        self.closed += 1

    def trajectory(self) -> Trajectory | None:
        return None


def task(**changes: Any) -> EpisodeTask:
    base = EpisodeTask(family=get("ledger"), task_id="t", task_seed=1, policy_seed=2)
    return replace(base, **changes)


async def play(turns: Sequence[str | Exception | float], runner: Any, **changes: Any) -> Any:
    policy = Lines(turns)
    result = await run_episode(task(**changes), policy, runner)
    assert EpisodeResult.model_validate_json(result.model_dump_json()) == result
    assert [session.closed for session in policy.sessions] == [1] * len(policy.sessions)
    return result


async def test_large_agents_read_whole_files_and_tiny_ones_do_not(runner: Any) -> None:
    turns = [render_call("read_file", {"path": "INSTRUCTIONS.md"}), "bye"]
    tiny = await play(turns, runner)
    large = await play(turns, runner, style="full")
    assert len(tiny.turns[2].result) == 1200
    assert "left out" not in large.turns[2].result
    assert "0.25 * post" in large.turns[2].result


async def test_turn_without_a_call_ends_the_episode(runner: Any) -> None:
    result = await play([LIST, "I am done."], runner)
    assert (result.outcome_code, result.reward, result.num_turns) == ("no_call", -0.1, 2)
    assert [turn.role for turn in result.turns] == ["system", "user", "assistant", "assistant"]
    assert result.turns[2].tool == "list_files"
    assert "TASK.md" in (result.turns[2].result or "")
    assert not result.is_fault


async def test_three_malformed_calls_end_the_episode(runner: Any) -> None:
    result = await play(["<tool_call>{", LIST, "<tool_call>\n[]\n</tool_call>"], runner)
    assert (result.outcome_code, result.num_turns) == ("malformed_calls", 4)
    malformed = [turn for turn in result.turns if turn.role == "assistant" and turn.tool is None]
    assert len(malformed) == 3
    assert all((turn.result or "").startswith("error: ") for turn in malformed)


async def test_turns_are_capped(runner: Any) -> None:
    result = await play([LIST], runner, rules=PromptRules(max_turns=5))
    assert (result.outcome_code, result.num_turns) == ("max_turns", 5)


async def test_three_rejections_use_up_the_attempts(runner: Any) -> None:
    result = await play([SUBMIT], runner)
    assert (result.outcome_code, result.num_turns) == ("attempts_used_up", 3)
    assert [attempt.ok for attempt in result.attempts] == [False] * 3
    assert result.attempts[0].problems[0].fix
    assert result.reward == -0.1  # no job.toml: nothing readable was submitted
    manifest = render_call("write_file", {"path": "job.toml", "content": 'base_model = "nano"\n'})
    result = await play([manifest, SUBMIT], runner)
    assert (result.outcome_code, result.reward) == ("attempts_used_up", 0.0)
    assert result.manifest.base_model == "nano"
    assert runner.ran == []


async def test_second_attempt_pays_less(runner: Any) -> None:
    class Stumbler:
        def begin(self, prompt: AgentPrompt, seed: int) -> Any:
            session = scripted("template").begin(prompt, seed)
            act = session.act
            said = []

            async def act_after_one_slip() -> AgentTurn:
                said.append(1)
                return AgentTurn(text=SUBMIT) if len(said) == 1 else await act()

            async def observe(result: str) -> None:
                if len(said) > 1:
                    session._result = result

            session.act, session.observe = act_after_one_slip, observe
            return session

    first = await run_episode(task(), scripted("template"), runner)
    second = await run_episode(task(), Stumbler(), runner)
    assert (first.valid_attempt, second.valid_attempt) == (1, 2)
    assert first.reward - second.reward == pytest.approx(0.35 * 0.2)
    assert [attempt.ok for attempt in second.attempts] == [False, True]


async def test_full_context_is_the_agents_ending(runner: Any) -> None:
    result = await play([LIST, ContextFullError("no room")], runner)
    assert (result.outcome_code, result.detail) == ("context_full", "no room")
    assert not result.is_fault


@pytest.mark.parametrize(
    "error", [LearnerError("no GPU"), ConnectionResetError("gone"), EOFError("closed")]
)
async def test_dead_policy_is_a_fault_not_an_exception(runner: Any, error: Exception) -> None:
    result = await play([LIST, error], runner)
    assert result.outcome_code == "policy_failed"
    assert str(error) in result.detail
    assert result.num_turns == 1
    assert result.is_fault


async def test_slow_policy_is_timed_out(runner: Any) -> None:
    result = await play([LIST, 30.0], runner, limits=EpisodeLimits(turn_s=0.02))
    assert (result.outcome_code, result.is_fault) == ("policy_timed_out", True)


async def test_policy_that_cannot_begin_is_a_fault(runner: Any) -> None:
    class Unborn:
        def begin(self, prompt: AgentPrompt, seed: int) -> Any:
            raise LearnerError("no weights")

    assert (await run_episode(task(), Unborn(), runner)).outcome_code == "policy_failed"


async def test_bug_in_a_policy_propagates_after_the_session_is_closed(runner: Any) -> None:
    policy = Lines([KeyError("bug")])
    with pytest.raises(KeyError):
        await run_episode(task(), policy, runner)
    assert policy.sessions[0].closed == 1


@pytest.mark.parametrize(("stage", "reward"), [("baselines", -0.1), ("check", -0.1), ("run", 0.35)])
async def test_dead_runner_is_a_fault(make_runner: Any, stage: str, reward: float) -> None:
    runner = make_runner(die_in=stage, error=lambda: FleetError("no workers"))
    result = await run_episode(task(), scripted("oracle"), runner)
    assert (result.outcome_code, result.is_fault) == ("runner_failed", True)
    assert "no workers" in result.detail
    assert result.reward == pytest.approx(reward)


async def test_slow_runner_is_timed_out(runner: Any) -> None:
    class Slow(type(runner)):  # type: ignore[misc]
        async def run(self, bundle: Any, family: str) -> Outcome:
            await asyncio.sleep(30)
            raise AssertionError

    result = await run_episode(task(limits=EpisodeLimits(job_s=0.02)), scripted("noop"), Slow())
    assert result.outcome_code == "runner_timed_out"


@pytest.mark.parametrize(
    ("status", "reason", "code", "seed_reward", "paired_reward"),
    [
        ("failed", "env.crashed", "job_failed", 0.35, 0.0),
        ("failed", "train.diverged", "job_failed", 0.35, 0.35),
        ("timed_out", "train.timeout", "job_timed_out", 0.35, 0.35),
        ("lost", "worker.lost", "job_lost", 0.35, 0.35),
    ],
)
async def test_dead_job_is_an_outcome(
    runner: Any, status: Any, reason: str, code: str, seed_reward: float, paired_reward: float
) -> None:
    class Dead(type(runner)):  # type: ignore[misc]
        async def run(self, bundle: Any, family: str) -> Outcome:
            return Outcome(
                job_hash=bundle.job_hash,
                family=family,
                base_model="micro",
                status=status,
                reason=reason,
            )

    result = await run_episode(task(), scripted("template"), Dead())
    assert (result.outcome_code, result.detail) == (code, reason)
    assert result.terms["seed"].total == pytest.approx(seed_reward)
    assert result.terms["paired"].total == pytest.approx(paired_reward)
    assert not result.is_fault


async def test_cancellation_propagates_after_cleanup(runner: Any) -> None:
    policy = Lines([60.0])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await run_episode(task(), policy, runner)
    assert policy.sessions[0].closed == 1


async def test_workspace_is_removed_unless_a_folder_is_given(runner: Any, tmp_path: Path) -> None:
    result = await play([LIST, "bye"], runner, folder=tmp_path / "kept")
    assert result.outcome_code == "no_call"
    assert (tmp_path / "kept" / "TASK.md").exists()
    again = await play([LIST, "bye"], runner, folder=tmp_path / "kept")
    assert again.outcome_code == "workspace_failed"


async def test_starting_files_that_do_not_fit_are_a_fault(runner: Any) -> None:
    rules = PromptRules(workspace=WorkspaceLimits(max_files=1))
    result = await play([LIST], runner, rules=rules)
    assert (result.outcome_code, result.is_fault) == ("workspace_failed", True)


async def test_paired_kind_pays_the_paired_total(runner: Any) -> None:
    result = await run_episode(
        task(rules=PromptRules(reward_kind="paired")), scripted("oracle"), runner
    )
    assert result.reward == result.terms["paired"].total != result.terms["seed"].total


async def test_events_tell_the_story(runner: Any) -> None:
    told: list[EpisodeEvent] = []
    await run_episode(task(), scripted("template"), runner, events=told.append)
    assert [event.kind for event in told] == [
        "begun",
        "turn",
        "turn",
        "turn",
        "turn",
        "dispatched",
        "finished",
    ]


async def test_same_seeds_same_episode(make_runner: Any) -> None:
    results = [await run_episode(task(), scripted("random"), make_runner()) for _ in range(2)]
    same = [result.model_copy(update={"seconds": 0.0}) for result in results]
    assert same[0] == same[1]


VOCABULARY = Tokenizer.closed(["<tool_call>\n", "\n</tool_call>", LIST, SUBMIT])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    ids: list[int]
    logprobs: list[float]
    stopped: bool


class Babbler:
    """Any token at random, special ones and half characters included."""

    async def sample(
        self, ids: Sequence[int], *, session: str, seed: int, max_tokens: int, temperature: float
    ) -> Turn:
        rng = random.Random(seed)
        drawn = []
        while len(drawn) < max_tokens:
            drawn.append(rng.randrange(VOCABULARY.vocab_size))
            if rng.random() < 0.1:
                drawn[-1] = VOCABULARY.turn_end_id
            if drawn[-1] == VOCABULARY.turn_end_id:
                break
        stopped = drawn[-1] == VOCABULARY.turn_end_id
        return Turn(ids=drawn, logprobs=[-1.0] * len(drawn), stopped=stopped)


async def test_babbling_model_plays_to_an_end(make_runner: Any) -> None:
    policy = TokenPolicy(
        tokenizer=VOCABULARY, sampler=Babbler(), max_turn_tokens=30, max_total_tokens=4000
    )
    codes = set()
    for seed in range(40):
        result = await run_episode(task(policy_seed=seed), policy, make_runner())
        assert result.trajectory is not None
        assert sum(result.trajectory.sampled) == result.sampled_tokens
        assert EpisodeResult.model_validate_json(result.model_dump_json()) == result
        codes.add(result.outcome_code)
    assert codes <= {"no_call", "malformed_calls", "context_full", "max_turns", "attempts_used_up"}
    assert "no_call" in codes


async def test_small_context_ends_the_episode(runner: Any) -> None:
    class Lister(Babbler):
        async def sample(self, ids: Sequence[int], **rest: Any) -> Turn:
            said = [*VOCABULARY.encode(LIST), VOCABULARY.turn_end_id]
            return Turn(ids=said, logprobs=[0.0] * len(said), stopped=True)

    prompt_len = 2200
    policy = TokenPolicy(tokenizer=VOCABULARY, sampler=Lister(), max_total_tokens=prompt_len)
    result = await run_episode(task(), policy, runner)
    assert result.outcome_code == "context_full"
    assert result.trajectory is not None
    assert len(result.trajectory.ids) <= prompt_len


RAW = st.one_of(
    st.text(max_size=200),
    st.text(st.characters(), max_size=80),  # lone surrogates too
    st.binary(max_size=200).map(lambda data: data.decode("utf-8", "replace")),
    st.binary(max_size=200).map(lambda data: data.decode("latin-1")),
    st.text(max_size=60).map(lambda text: f"<tool_call>\n{text}\n</tool_call>"),
    st.dictionaries(
        st.sampled_from(["path", "content", "old", "new"]),
        st.one_of(st.text(max_size=20), st.sampled_from(["job.toml", "environment/taskset.py"])),
        max_size=3,
    ).flatmap(
        lambda arguments: st.sampled_from(
            ["read_file", "write_file", "edit_file", "submit_job", "list_files", "rm"]
        ).map(lambda name: render_call(name, arguments))
    ),
    st.integers(0, 5000).map(lambda depth: "<tool_call>\n" + '{"a":' * depth),
)


@pytest.mark.long
@given(turns=st.lists(RAW, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_model_text_raises(make_runner: Callable[[], Any], turns: list[str]) -> None:
    limits = EpisodeLimits(tools=ToolLimits(max_result_chars=200))
    result = asyncio.run(play([*turns, "end"], make_runner(), limits=limits))
    assert not result.is_fault
    assert -0.6 <= result.reward <= 1
