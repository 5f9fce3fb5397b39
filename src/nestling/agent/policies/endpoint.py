"""Any OpenAI-compatible chat endpoint with tools as an agent, for evaluation.

It gives text, not tokens: its episodes can be scored and compared, not trained on. Structured
`tool_calls` and calls written into the text both count. Whatever a reply is, it becomes a turn; only an
endpoint that does not answer, refuses, or would cost more than it may ends the episode as a fault.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from nestling.agent.policies.endpoint_budget import TokenBudget
from nestling.agent.policies.endpoint_client import EndpointClient, EndpointError
from nestling.agent.policies.endpoint_config import EndpointConfig, TokenPrices
from nestling.agent.policies.endpoint_reply import (
    EMPTY_TURN,
    ReadReply,
    read_reply,
    turn_message,
)
from nestling.agent.policy import AgentTurn, ContextFullError
from nestling.agent.prompt import AgentPrompt
from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed, stream

__all__ = ["EndpointConfig", "EndpointError", "EndpointPolicy", "EndpointSession", "TokenPrices"]

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_CONNECT_S: Final = 10.0


class EndpointPolicy:
    """An agent behind HTTP; make one with `opened`."""

    def __init__(self, config: EndpointConfig, client: EndpointClient, budget: TokenBudget) -> None:
        self.config = config
        self.client = client
        self.budget = budget
        """What all sessions used so far."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        config: EndpointConfig,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[EndpointPolicy]:
        """The policy, with its connections closed at the end; nothing is asked before the first turn.

        Raises:
            ConfigError: the key in the environment variable cannot be one.
        """
        key = _key(config, os.environ if environment is None else environment)
        budget = TokenBudget(
            max_tokens=config.max_tokens, max_usd=config.max_usd, prices=config.prices
        )
        is_local = urlsplit(config.url).hostname in _LOOPBACK
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(config.timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=config.concurrency),
            trust_env=not is_local,  # a proxy of the environment is of no use on this machine
        ) as http:
            client = EndpointClient(
                config, http, key=key, budget=budget, clock=clock or SystemClock()
            )
            yield cls(config, client, budget)

    def begin(self, prompt: AgentPrompt, seed: int) -> EndpointSession:
        """A session; `seed` is passed on, and it depends on the endpoint whether it helps."""
        return EndpointSession(self, prompt, seed)


class EndpointSession:
    """One episode as a list of chat messages."""

    def __init__(self, policy: EndpointPolicy, prompt: AgentPrompt, seed: int) -> None:
        self._policy = policy
        self._seed = seed
        self._rng: random.Random = stream(seed, "endpoint-waits")
        self._tools = list(prompt.tool_schemas)
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": prompt.user},
        ]
        self._last: ReadReply | None = None
        self._num_turns = 0
        self._is_closed = False

    async def act(self) -> AgentTurn:
        """Ask for one turn; raises as `EndpointClient.ask`."""
        if self._is_closed:
            raise ContextFullError("the session is closed")
        config = self._policy.config
        body = {
            "model": config.model,
            "messages": self._messages,
            "tools": self._tools,
            "temperature": config.temperature,
            "max_tokens": config.max_turn_tokens,
            "seed": derive_seed(self._seed, "turn", self._num_turns),
        }
        value = await self._policy.client.ask(body, self._rng)
        return self._take(read_reply(value, self._num_turns))

    async def replay(self, turn: AgentTurn) -> AgentTurn | None:
        """Take over a recorded turn by its text."""
        if self._is_closed:
            return None
        reply = turn_message(turn.text, self._num_turns)
        self._take(reply)
        return turn

    async def observe(self, tool_result: str) -> None:
        """Answer the calls of the last turn, or the turn itself when it holds none."""
        last = self._last
        assert last is not None, "observe follows a turn"
        for call_id in last.call_ids:
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": tool_result})
        if last.call_ids:
            return
        content = f"<tool_response>\n{tool_result}\n</tool_response>"
        if last.text == EMPTY_TURN:
            content = "error: your reply was empty; answer with exactly one tool call"
        self._messages.append({"role": "user", "content": content})

    def close(self) -> None:
        """No further turn is asked for."""
        self._is_closed = True

    def trajectory(self) -> None:
        """No tokens are known."""

    def _take(self, reply: ReadReply) -> AgentTurn:
        self._num_turns += 1
        self._last = reply
        if reply.message is not None:
            self._messages.append(reply.message)
        return AgentTurn(text=reply.text, truncated=reply.truncated)


def _key(config: EndpointConfig, environment: Mapping[str, str]) -> SecretStr | None:
    """The API key; only ever from the environment."""
    text = environment.get(config.key_env, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"{config.key_env} holds blanks or letters that no key has; expected one line of "
            f"printable ASCII; set it again"
        )
    return SecretStr(text)
