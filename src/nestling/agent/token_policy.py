"""Any token-in token-out sampler as a policy. History is appended, never rendered again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nestling.agent.policy import AgentTurn, ContextFullError, Trajectory
from nestling.agent.prompt import AgentPrompt
from nestling.agent.turn_log import storable
from nestling.core.seeds import derive_seed
from nestling.engine.chat import Message, prompt_ids, tool_result_ids
from nestling.engine.tokenizer import Tokenizer

__all__ = ["ChatFormat", "OwnChat", "Sampled", "TokenPolicy", "TokenSampler", "TokenSession"]

_MIN_TURN_TOKENS = 2
"""One token and the turn end."""


class Sampled(Protocol):
    """What a sampler returns; any object with these three fields will do."""

    @property
    def ids(self) -> Sequence[int]:
        """New tokens; the last one is the turn end when `stopped`."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Of the sampling distribution (temperature applied), one per id."""
        ...

    @property
    def stopped(self) -> bool:
        """The model ended its turn; False when it was cut at `max_tokens`."""
        ...


class TokenSampler(Protocol):
    """Continues token sequences."""

    async def sample(
        self, ids: Sequence[int], *, session: str, seed: int, max_tokens: int, temperature: float
    ) -> Sampled:
        """Continue `ids` up to the turn end or `max_tokens`.

        `session` names the episode, so that a cache of earlier ids can be reused; `ids` always
        starts with the ids of the session's previous call.
        """
        ...


class ChatFormat(Protocol):
    """How a conversation becomes tokens that are only ever appended to."""

    def prompt_ids(
        self, system: str, user: str, tool_schemas: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The opening, ready for the first turn."""
        ...

    def tool_result_ids(self, content: str) -> list[int]:
        """What follows a turn end: a tool's answer, ready for the next turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChat:
    """The dialect of `engine.chat`, which our own models are trained on."""

    tokenizer: Tokenizer

    def prompt_ids(
        self, system: str, user: str, tool_schemas: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """See `ChatFormat`."""
        messages = [Message(role="system", content=system), Message(role="user", content=user)]
        return prompt_ids(self.tokenizer, messages, tool_schemas)

    def tool_result_ids(self, content: str) -> list[int]:
        """See `ChatFormat`."""
        return tool_result_ids(self.tokenizer, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPolicy:
    """A model, its tokenizer and how it samples; the temperature is part of what the policy is."""

    tokenizer: Tokenizer
    sampler: TokenSampler
    chat: ChatFormat | None = None
    """None: `OwnChat`."""
    temperature: float = 0.7
    max_turn_tokens: int = 256
    """Tokens of one turn, the turn end included."""
    max_total_tokens: int = 2048
    """Prompt, turns and tool results."""

    def begin(self, prompt: AgentPrompt, seed: int) -> TokenSession:
        """A session; tool schemas are rendered into the prompt for the full style only."""
        schemas = prompt.tool_schemas if prompt.style == "full" else None
        opening = self.format.prompt_ids(prompt.system, prompt.user, schemas)
        return TokenSession(self, opening, seed)

    @property
    def format(self) -> ChatFormat:
        """The chat format in use."""
        return self.chat or OwnChat(tokenizer=self.tokenizer)


class TokenSession:
    """The growing token history of one episode."""

    def __init__(self, policy: TokenPolicy, prompt: list[int], seed: int) -> None:
        self._policy = policy
        self._seed = seed
        self._session = f"{seed:016x}-{len(prompt)}-{derive_seed(seed, *prompt):016x}"
        self._prompt_len = len(prompt)
        self._ids = list(prompt)
        self._sampled = [False] * len(prompt)
        self._logprobs = [0.0] * len(prompt)
        self._num_turns = 0
        self._turn_open = False
        self._is_closed = False

    async def act(self) -> AgentTurn:
        """Sample one turn; raises `ContextFullError` when fewer than two tokens are left."""
        if self._is_closed:
            raise ContextFullError("the session is closed")
        policy = self._policy
        room = policy.max_total_tokens - len(self._ids)
        if room < _MIN_TURN_TOKENS:
            raise ContextFullError(
                f"history has {len(self._ids)} tokens of {policy.max_total_tokens}"
            )
        sampled = await policy.sampler.sample(
            list(self._ids),
            session=self._session,
            seed=derive_seed(self._seed, "turn", self._num_turns),
            max_tokens=min(room, policy.max_turn_tokens),
            temperature=policy.temperature,
        )
        ids, logprobs = tuple(sampled.ids), tuple(sampled.logprobs)
        if len(ids) != len(logprobs):
            raise ValueError(f"sampler gave {len(ids)} ids but {len(logprobs)} logprobs")
        return self._take(self._turn(ids, logprobs, truncated=not sampled.stopped))

    async def replay(self, turn: AgentTurn) -> AgentTurn | None:
        """Append recorded tokens; None when they do not fit or the tokenizer reads them otherwise."""
        policy = self._policy
        room = min(policy.max_total_tokens - len(self._ids), policy.max_turn_tokens)
        fits = 0 < len(turn.ids) == len(turn.logprobs) <= room
        known = all(0 <= token < policy.tokenizer.vocab_size for token in turn.ids)
        if self._is_closed or not fits or not known:
            return None
        own = self._turn(turn.ids, turn.logprobs, truncated=turn.truncated)
        return self._take(own) if storable(own.text) == turn.text else None

    async def observe(self, tool_result: str) -> None:
        """Append the result; a turn that was cut is first closed by a turn end that was not sampled."""
        policy = self._policy
        closing = [policy.tokenizer.turn_end_id] if self._turn_open else []
        self._append((*closing, *policy.format.tool_result_ids(tool_result)))
        self._turn_open = False

    def close(self) -> None:
        """No further turn is sampled."""
        self._is_closed = True

    def trajectory(self) -> Trajectory:
        """All tokens up to the last sampled one: what was fed after it taught nothing."""
        length = max(
            (place + 1 for place, sampled in enumerate(self._sampled) if sampled),
            default=self._prompt_len,
        )
        return Trajectory(
            ids=tuple(self._ids[:length]),
            sampled=tuple(self._sampled[:length]),
            logprobs=tuple(self._logprobs[:length]),
            prompt_len=self._prompt_len,
            temperature=self._policy.temperature,
        )

    def _turn(
        self, ids: tuple[int, ...], logprobs: tuple[float, ...], *, truncated: bool
    ) -> AgentTurn:
        tokenizer = self._policy.tokenizer
        said = ids[:-1] if ids and ids[-1] == tokenizer.turn_end_id else ids
        text = tokenizer.decode(said)
        return AgentTurn(text=text, ids=ids, logprobs=logprobs, truncated=truncated)

    def _take(self, turn: AgentTurn) -> AgentTurn:
        self._num_turns += 1
        self._append(turn.ids, turn.logprobs)
        self._turn_open = not turn.ids or turn.ids[-1] != self._policy.tokenizer.turn_end_id
        return turn

    def _append(self, ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None) -> None:
        self._ids += ids
        self._sampled += [logprobs is not None] * len(ids)
        self._logprobs += logprobs if logprobs is not None else [0.0] * len(ids)
