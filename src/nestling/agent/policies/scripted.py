"""Reference agents without a model: noop, random, template and oracle.

They play real episodes through the same tools, in the same dialect, as any model. Their rewards are
the lines every learned agent is compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from nestling.agent.policy import AgentTurn, Trajectory
from nestling.agent.prompt import AgentPrompt
from nestling.agent.rubrics import RUBRICS, render_rubric
from nestling.agent.tools import ACCEPTED
from nestling.agent.turn_log import storable
from nestling.engine.chat import render_call
from nestling.families.registry import get as get_family
from nestling.jobs.bounds import SMALL, Bounds, Key, number
from nestling.jobs.template import (
    EXACT_REWARD,
    RANGE_GAP,
    REWARDS_GAP,
    TASKSET_PATH,
    template_files,
)

__all__ = ["SCRIPTED", "Script", "ScriptedPolicy", "scripted"]

Script = Callable[[AgentPrompt, random.Random, Bounds], Generator[str, str, None]]
"""Yields turns, is sent tool results; its end is a turn without a call."""

_GIVE_UP: Final = "I stop here."
_BEST_LR: Final = {"nano": "3e-4"}
"""Where 1e-3 is too high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedPolicy:
    """A script as a policy; everything random in it comes from the session's seed."""

    name: str
    script: Script
    bounds: Bounds = SMALL

    def begin(self, prompt: AgentPrompt, seed: int) -> _ScriptedSession:
        """One run of the script."""
        return _ScriptedSession(self.script(prompt, random.Random(seed), self.bounds))


class _ScriptedSession:
    def __init__(self, turns: Generator[str, str, None]) -> None:
        self._turns = turns
        self._result: str | None = None
        self._unsaid: str | None = None

    async def act(self) -> AgentTurn:
        if self._unsaid is not None:
            text, self._unsaid = self._unsaid, None
            return AgentTurn(text=text)
        try:
            text = next(self._turns) if self._result is None else self._turns.send(self._result)
        except StopIteration:
            text = _GIVE_UP
        return AgentTurn(text=text)

    async def replay(self, turn: AgentTurn) -> AgentTurn | None:
        own = await self.act()
        if storable(own.text) == turn.text:
            return own
        self._unsaid = own.text
        return None

    async def observe(self, tool_result: str) -> None:
        self._result = tool_result

    def close(self) -> None:
        self._turns.close()

    def trajectory(self) -> Trajectory | None:
        return None


def noop(
    prompt: AgentPrompt,
    rng: random.Random,  # noqa: ARG001
    bounds: Bounds,
) -> Generator[str, str, None]:
    """A valid job on the better base that trains next to nothing: one step of the smallest size."""
    base = _best_base((yield _call("get_baseline_scores")), bounds)
    smallest = ("lr", "max_steps", "batch_size", "group_size")
    yield from _fill(prompt, EXACT_REWARD)
    yield _write_manifest(base, {name: _lowest(name, bounds) for name in smallest})
    yield _call("submit_job")


def template(
    prompt: AgentPrompt,
    rng: random.Random,  # noqa: ARG001 (a script's signature)
    bounds: Bounds,  # noqa: ARG001
) -> Generator[str, str, None]:
    """The family's worked job as a careful person would write it."""
    yield from _fill(prompt, EXACT_REWARD)
    yield _call("write_file", path="job.toml", content=template_files(prompt.family)["job.toml"])
    yield _call("submit_job")


def oracle(
    prompt: AgentPrompt,
    rng: random.Random,  # noqa: ARG001
    bounds: Bounds,
) -> Generator[str, str, None]:
    """The best job known: the better base, the highest stable learning rate, the whole budget."""
    base = _best_base((yield _call("get_baseline_scores")), bounds)
    settings = {"lr": _BEST_LR.get(base, "1e-3"), "max_steps": "16", "batch_size": "64"}
    yield from _fill(prompt, EXACT_REWARD)
    yield _write_manifest(base, settings | {"group_size": "8"})
    yield _call("submit_job")


def random_job(
    prompt: AgentPrompt, rng: random.Random, bounds: Bounds
) -> Generator[str, str, None]:
    """Any base, allowed settings and range, any rubric; another draw after each rejection."""
    rubrics = [rubric for rubric in RUBRICS.values() if not rubric.is_refused]
    rng.shuffle(rubrics)
    rewards = render_rubric(rubrics.pop(), rng)
    yield from _fill(prompt, rewards, span=_random_span(rng))
    while True:
        yield _write_manifest(rng.choice(bounds.base_models), _random_settings(rng, bounds))
        answer = yield _call("submit_job")
        if answer == ACCEPTED or not rubrics:
            return
        if "[rubric]" in answer:
            refused, rewards = rewards, render_rubric(rubrics.pop(), rng)
            yield _edit(refused, rewards)


SCRIPTED: Final[dict[str, Script]] = {
    "noop": noop,
    "random": random_job,
    "template": template,
    "oracle": oracle,
}
"""By name."""


def scripted(name: str, bounds: Bounds = SMALL) -> ScriptedPolicy:
    """The reference agent of that name; `KeyError` for another."""
    return ScriptedPolicy(name=name, script=SCRIPTED[name], bounds=bounds)


def _fill(
    prompt: AgentPrompt, rewards: str, *, span: str | None = None
) -> Generator[str, str, None]:
    """Fill the template's two gaps; the default range is the hidden eval's."""
    lo, hi = get_family(prompt.family).eval_range
    yield _edit(RANGE_GAP, span or f"{lo}, {hi}")
    yield _edit(REWARDS_GAP, rewards)


def _write_manifest(base: str, settings: dict[str, str]) -> str:
    lines = [f'base_model = "{base}"', "", "[prime_rl]"]
    lines += [f"{key} = {value}" for key, value in settings.items()]
    return _call("write_file", path="job.toml", content="\n".join(lines) + "\n")


def _best_base(scores: str, bounds: Bounds) -> str:
    """The base with the highest score in the tool's answer; the last one when it gave none."""
    best, best_score = bounds.base_models[-1], -math.inf
    for line in scores.splitlines():
        name, _, score = line.partition(" ")
        if name in bounds.base_models and float(score) > best_score:
            best, best_score = name, float(score)
    return best


def _random_settings(rng: random.Random, bounds: Bounds) -> dict[str, str]:
    """Every main key within its bounds; sizes are powers of two that fit together and the budget."""
    keys = {key.name: key for key in bounds.keys if key.main}
    settings = {name: _random_value(rng, key) for name, key in keys.items()}
    batches = _powers(keys["batch_size"])
    batch = rng.choice(batches)
    steps_low, steps_high = _limits(keys["max_steps"])
    most = min(int(steps_high), bounds.max_rollouts // batch)
    groups = [size for size in _powers(keys["group_size"]) if batch % size == 0]
    settings["batch_size"] = str(batch)
    settings["max_steps"] = str(rng.randint(int(steps_low), most))
    settings["group_size"] = str(rng.choice(groups))
    return settings


def _random_value(rng: random.Random, key: Key) -> str:
    if key.kind == "choice":
        return f'"{rng.choice(key.choices)}"'
    if key.kind == "bool":
        return rng.choice(("true", "false"))
    low, high = _limits(key)
    if key.kind == "int":
        return str(rng.randint(int(low), int(high)))
    if low > 0 and high / low > 100:
        drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        drawn = rng.uniform(low, high)
    return number(min(high, max(low, float(f"{drawn:.2g}"))))


def _random_span(rng: random.Random) -> str:
    lo = rng.randint(1, 4)
    return f"{lo}, {lo + rng.randint(0, 4)}"


def _powers(key: Key) -> list[int]:
    low, high = _limits(key)
    return [2**power for power in range(int(high).bit_length()) if low <= 2**power <= high]


def _limits(key: Key) -> tuple[float, float]:
    assert key.low is not None
    assert key.high is not None
    return key.low, key.high


def _lowest(name: str, bounds: Bounds) -> str:
    key = bounds.get(name)
    assert key is not None
    return number(key.low)


def _edit(old: str, new: str) -> str:
    return _call("edit_file", path=TASKSET_PATH, old=old, new=new)


def _call(name: str, **arguments: str) -> str:
    return render_call(name, arguments)
