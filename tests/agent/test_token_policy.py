"""History is appended token by token; what the learner gets is what was sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from nestling.agent.policy import ContextFullError
from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import TokenPolicy
from nestling.engine.chat import Message, prompt_ids
from nestling.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.closed(["submit_job", "ledger", "hello "])
PROMPT = AgentPrompt(
    system="You write jobs.",
    user="family: ledger",
    tool_schemas=({"type": "function", "function": {"name": "submit_job"}},),
    style="compact",
    family="ledger",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(slots=True)
class Replay:
    """Says given texts, cut at `max_tokens`; remembers what it was asked."""

    texts: list[str]
    asked: list[tuple[list[int], str, int, int, float]] = field(default_factory=list)

    async def sample(
        self, ids: Sequence[int], *, session: str, seed: int, max_tokens: int, temperature: float
    ) -> Turn:
        self.asked.append((list(ids), session, seed, max_tokens, temperature))
        whole = [*TOKENIZER.encode(self.texts[len(self.asked) - 1]), TOKENIZER.turn_end_id]
        kept = whole[:max_tokens]
        rng = random.Random(seed)
        logprobs = [-rng.random() for _ in kept]
        return Turn(ids=kept, logprobs=logprobs, stopped=len(kept) == len(whole))


async def test_history_equals_the_rendered_conversation() -> None:
    sampler = Replay(["hello ledger", "submit_job", "end"])
    session = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler).begin(PROMPT, 3)
    first = await session.act()
    await session.observe("ok <|im_end|>")
    second = await session.act()
    await session.observe("done")
    await session.act()
    messages = [
        Message(role="system", content=PROMPT.system),
        Message(role="user", content=PROMPT.user),
        Message(role="assistant", content="hello ledger"),
        Message(role="tool", content="ok <|im_end|>"),
        Message(role="assistant", content="submit_job"),
        Message(role="tool", content="done"),
    ]
    assert sampler.asked[0][0] == prompt_ids(TOKENIZER, messages[:2])
    assert sampler.asked[1][0] == prompt_ids(TOKENIZER, messages[:4])
    assert sampler.asked[2][0] == prompt_ids(TOKENIZER, messages)
    assert (first.text, second.text) == ("hello ledger", "submit_job")
    assert not first.truncated


async def test_trajectory_marks_sampled_tokens_with_their_logprobs() -> None:
    sampler = Replay(["hello ledger", "submit_job"])
    session = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler, temperature=0.7).begin(PROMPT, 3)
    turns = [await session.act()]
    await session.observe("ok")
    turns.append(await session.act())
    await session.observe("this was fed after the last sampled token")
    session.close()
    session.close()
    trajectory = session.trajectory()
    assert trajectory.temperature == 0.7
    assert trajectory.prompt_len == len(sampler.asked[0][0])
    assert len(trajectory.ids) == len(trajectory.sampled) == len(trajectory.logprobs)
    chosen = [token for token, s in zip(trajectory.ids, trajectory.sampled, strict=True) if s]
    kept = [logp for logp, s in zip(trajectory.logprobs, trajectory.sampled, strict=True) if s]
    assert chosen == [*turns[0].ids, *turns[1].ids]
    assert kept == [*turns[0].logprobs, *turns[1].logprobs]
    assert trajectory.sampled[-1]
    fed = [logp for logp, s in zip(trajectory.logprobs, trajectory.sampled, strict=True) if not s]
    assert set(fed) == {0.0}


async def test_seeds_differ_by_turn_and_sessions_by_seed() -> None:
    sampler = Replay(["a", "b", "a"])
    policy = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler)
    session = policy.begin(PROMPT, 3)
    await session.act()
    await session.observe("ok")
    await session.act()
    await policy.begin(PROMPT, 4).act()
    _, sessions, seeds, _, _ = zip(*sampler.asked, strict=True)
    assert sessions[0] == sessions[1] != sessions[2]
    assert len(set(seeds)) == 3


async def test_cut_turn_is_closed_by_a_token_that_was_not_sampled() -> None:
    sampler = Replay(["hello " * 10, "submit_job"])
    session = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler, max_turn_tokens=4).begin(PROMPT, 3)
    turn = await session.act()
    assert turn.truncated
    assert turn.text == "hello " * 4
    await session.observe("error: too long")
    await session.act()
    prompt_len = len(sampler.asked[0][0])
    assert sampler.asked[1][0][prompt_len + 4] == TOKENIZER.turn_end_id
    trajectory = session.trajectory()
    assert trajectory.sampled[prompt_len : prompt_len + 5] == (True, True, True, True, False)


async def test_full_context_ends_the_session() -> None:
    prompt_len = len(prompt_ids(TOKENIZER, [Message(role="system", content=PROMPT.system)]))
    sampler = Replay(["hello " * 500])
    policy = TokenPolicy(
        tokenizer=TOKENIZER, sampler=sampler, max_turn_tokens=256, max_total_tokens=prompt_len + 60
    )
    session = policy.begin(PROMPT, 3)
    turn = await session.act()
    assert turn.truncated
    assert len(session.trajectory().ids) == policy.max_total_tokens
    await session.observe("error")
    with pytest.raises(ContextFullError, match="history has"):
        await session.act()
    assert len(session.trajectory().ids) == policy.max_total_tokens


async def test_schemas_are_shown_to_large_models_only() -> None:
    sampler = Replay(["a", "a"])
    policy = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler)
    await policy.begin(PROMPT, 1).act()
    full = AgentPrompt(
        system=PROMPT.system,
        user=PROMPT.user,
        tool_schemas=PROMPT.tool_schemas,
        style="full",
        family="ledger",
    )
    await policy.begin(full, 1).act()
    assert "<tools>" not in TOKENIZER.decode(sampler.asked[0][0])
    assert '"name": "submit_job"' in TOKENIZER.decode(sampler.asked[1][0])
