"""Rollouts: a model that samples turns, an environment that answers them.

The same code serves training (a jailed job) and the hidden eval (our own taskset in this
process), so both see a model's mistakes alike: a malformed call or an unknown tool is answered
with a text that says what was wrong and counts as a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from nestling.engine.chat import (
    FinalAnswer,
    MalformedCall,
    ToolCall,
    parse_turn,
    tool_result_ids,
)
from nestling.engine.model import Model
from nestling.engine.sampler import Rollout, SamplingParams, TurnEnd, play
from nestling.engine.tokenizer import Tokenizer
from nestling.jobs.env_protocol import ProtocolError, check_json
from nestling.jobs.opening import opening_ids
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutEnv, ScoreRecord

__all__ = ["EnvResponder", "EnvRollout", "play_env"]

_SAMPLER_ROWS: Final = 128
_CACHE_BYTES: Final = 2 * 1024**3
"""Of keys and values on a CPU: with a larger model, fewer rows are decoded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRollout:
    """A finished rollout and what the environment's rubric says of it."""

    rollout: Rollout
    score: ScoreRecord


def play_env(
    model: Model,
    env: RolloutEnv,
    row_indices: Sequence[int],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    show_tools: bool | None = None,
) -> list[EnvRollout]:
    """One rollout per entry of `row_indices`, in order, sampled with `seeds` and scored.

    `show_tools` as for `EnvResponder`.

    Raises:
        JailError: the environment failed as a whole; single bad calls and rewards never raise.
    """
    responder = EnvResponder(env, model.tokenizer, row_indices, show_tools=show_tools)
    rollouts = play(
        model,
        responder.prompts,
        seeds,
        params,
        responder.respond,
        max_rows=_max_rows(model, params),
    )
    scores = responder.score(rollouts)
    return [
        EnvRollout(rollout=rollout, score=score)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


class EnvResponder:
    """The environment's side of a batch of rollouts, for `play` and, per job, `play_stacked`."""

    def __init__(
        self,
        env: RolloutEnv,
        tokenizer: Tokenizer,
        row_indices: Sequence[int],
        *,
        show_tools: bool | None = None,
    ) -> None:
        """`show_tools` puts the tool schemas and `OPEN_RULES` into the system turn.

        Unless given, models of the hub get them; the shipped ones know their tools by name.
        """
        self._env = env
        self._tokenizer = tokenizer
        shown = not tokenizer.is_closed if show_tools is None else show_tools
        schemas = env.tool_schemas() if shown else None
        starts = env.reset(row_indices)
        self._ids = [start.rollout_id for start in starts]
        prompts: dict[tuple[str, str], list[int]] = {}
        for start in starts:
            key = (start.system_prompt, start.prompt)
            if key not in prompts:
                prompts[key] = opening_ids(tokenizer, *key, schemas)
        self.prompts = [prompts[start.system_prompt, start.prompt] for start in starts]
        """Prompt ids per rollout; rollouts of one row share the list."""
        self._read = [len(prompt) for prompt in self.prompts]
        self._finals: list[TurnEnd | None] = [None] * len(starts)

    def respond(self, turns: Sequence[TurnEnd]) -> list[list[int] | None]:
        """Ids that answer each turn's call; None after a final answer, a cut turn or a stop."""
        answers: list[list[int] | None] = [None] * len(turns)
        calls: list[CallRequest] = []
        callers: list[int] = []
        for position, turn in enumerate(turns):
            call = None if turn.truncated else self._call(turn)
            if call is None:
                self._finals[turn.row] = turn
            else:
                calls.append(call)
                callers.append(position)
        if not calls:
            return answers
        for position, text in zip(callers, self._env.step(calls), strict=True):
            turn = turns[position]
            if text is not None:
                answer = tool_result_ids(self._tokenizer, text)
                answers[position] = answer
                self._read[turn.row] += len(turn.ids) + len(answer)
        return answers

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoreRecord]:
        """Score all rollouts, in order; the environment forgets them."""
        finals = []
        for row, rollout in enumerate(rollouts):
            turn = self._finals[row]
            finals.append(
                FinalRequest(
                    rollout_id=self._ids[row],
                    text="" if turn is None else turn.text,
                    stop=rollout.stop,
                    prompt_tokens=0 if turn is None else self._read[row],
                    completion_tokens=0 if turn is None else len(turn.ids),
                )
            )
        return self._env.score(finals)

    def _call(self, turn: TurnEnd) -> CallRequest | None:
        match parse_turn(turn.text):
            case FinalAnswer():
                return None
            case ToolCall(name=name, arguments=arguments):
                malformed = _problem(arguments)
                name, arguments = ("", {}) if malformed else (name, arguments)
            case MalformedCall(reason=malformed):
                name, arguments = "", {}
        return CallRequest(
            rollout_id=self._ids[turn.row],
            text=turn.text,
            name=name,
            arguments=arguments,
            malformed=malformed,
            prompt_tokens=self._read[turn.row],
            completion_tokens=len(turn.ids),
        )


def _problem(arguments: dict[str, Any]) -> str | None:
    """Why arguments cannot travel to the environment: whole numbers beyond 64 bits, huge lists."""
    try:
        check_json(arguments)
    except ProtocolError as e:
        return f"the arguments hold {e}"
    return None


def _max_rows(model: Model, params: SamplingParams) -> int | None:
    """How many rows' keys and values fit; None leaves it to the sampler."""
    config = model.config
    row_bytes = 2 * 4 * config.num_layers * config.kv_size * params.max_total_tokens
    if model.device.type != "cpu" or row_bytes * _SAMPLER_ROWS <= _CACHE_BYTES:
        return None
    return max(1, _CACHE_BYTES // row_bytes)
