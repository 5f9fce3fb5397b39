"""A noisy demonstrator: plays whole episodes, makes the mistakes people make, and repairs them.

The embedded agent is warm-started on its episodes. It chooses base, settings, data range and rubric
nearly at random and slips often, so that an agent which imitates it has everything to learn from
reward. It is a policy like any other: the real probe reads what it writes.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final

from nestling.agent.policy import AgentTurn, Trajectory
from nestling.agent.prompt import AgentPrompt
from nestling.agent.rubrics import RUBRICS, Rubric, draw_rubric, render_rubric
from nestling.engine.chat import render_call
from nestling.jobs.bounds import MAX_ROLLOUTS
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP

__all__ = ["DemoRates", "Demonstrator", "script"]

_TASKSET: Final = "environment/taskset.py"
_BASES: Final = ("nano", "micro")
_LOOK: Final = render_call("get_baseline_scores", {})
_RATES: Final = (
    ("1e-5", 0.12),
    ("3e-5", 0.16),
    ("1e-4", 0.26),
    ("3e-4", 0.28),
    ("1e-3", 0.15),
    ("3e-3", 0.03),
)
"""Values that ruin a model are rare: else writing settings at all pays less than leaving them out."""
_KEY_SLIPS: Final = {
    "lr": "learning_rate",
    "max_steps": "steps",
    "batch_size": "batch",
    "group_size": "group",
    "optimizer": "optim",
}
_BOUND_SLIPS: Final = {
    "lr": ("1e-2", "3e-2"),
    "max_steps": ("32", "64"),
    "temperature": ("0.1", "2.0"),
    "group_size": ("1", "32"),
}
_STAGES: Final = ("forget", "key", "bounds", "divide", "budget", "gap", "syntax", "name", "rubric")
"""Slips in the order in which the probe finds them; key and bounds are found together."""
_FOUND_TOGETHER: Final = {
    "key": ("key", "bounds"),
    "bounds": ("key", "bounds"),
    "syntax": ("gap", "syntax"),
    "gap": ("gap", "syntax"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRates:
    """How often each slip happens, per episode."""

    syntax: float = 0.25
    name: float = 0.10
    key: float = 0.04
    bounds: float = 0.04
    forget: float = 0.13
    gap: float = 0.13
    divide: float = 0.03
    budget: float = 0.03
    bad_repair: float = 0.3
    """A repair that does not repair."""
    settings: float = 0.96
    """Share of jobs that set anything in [prime_rl] at all; what is left to learn is the values."""
    each_setting: float = 0.8
    """Share of the main keys that such a job sets."""
    look: float = 0.5
    """Asks for the untrained scores first."""
    heed: float = 0.9
    """Having seen them, takes the higher base; else, and without a look, a coin decides."""


@dataclass(slots=True)
class _Draft:
    """What has been decided, and what is still wrong with it."""

    base: str
    settings: list[list[str]]
    """Key and value as written."""
    reward: str
    span: str
    slips: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Slip to (path, text as written, text as it should be)."""

    def toml(self) -> str:
        lines = [f'base_model = "{self.base}"']
        if self.settings:
            lines += ["", "[prime_rl]", *(f"{key} = {value}" for key, value in self.settings)]
        return "\n".join(lines) + "\n"


def script(rng: random.Random, rates: DemoRates) -> Generator[str, str, None]:
    """One episode: yields turn texts, is sent tool results; ends after an accepted job."""
    draft = _draft(rng, rates)
    for call in _look_around(rng):
        yield call
    looks = rng.random() < rates.look
    if looks:
        scores = yield _LOOK
        if rng.random() < rates.heed:
            draft.base = _higher(scores)
    # Who looks decides at once: a copy over a few tokens is learnt, one across a whole file was not.
    for call in _first_version(draft, rng, base_first=looks):
        yield call
    while True:
        result = yield render_call("submit_job", {})
        if result.startswith("accepted"):
            return
        for call in _repair(draft, result, rng, rates):
            yield call


class Demonstrator:
    """The demonstrator as a policy; a session's choices come from its seed alone."""

    def __init__(self, rates: DemoRates | None = None) -> None:
        self._rates = rates or DemoRates()

    def begin(self, prompt: AgentPrompt, seed: int) -> _DemoSession:
        """A fresh episode."""
        del prompt  # its choices are random, or answer a tool
        return _DemoSession(script(random.Random(seed), self._rates))


class _DemoSession:
    def __init__(self, turns: Generator[str, str, None]) -> None:
        self._turns = turns
        self._next: str | None = next(turns)

    async def act(self) -> AgentTurn:
        return AgentTurn(text=self._next if self._next is not None else "done")

    async def replay(self, turn: AgentTurn) -> AgentTurn | None:
        own = await self.act()
        return own if own.text == turn.text else None

    async def observe(self, tool_result: str) -> None:
        try:
            self._next = self._turns.send(tool_result)
        except StopIteration:
            self._next = None

    def close(self) -> None:
        self._turns.close()

    def trajectory(self) -> Trajectory | None:
        return None


def _draft(rng: random.Random, rates: DemoRates) -> _Draft:
    lo = rng.randint(1, 4)
    rubric = draw_rubric(rng)
    draft = _Draft(
        base=rng.choice(_BASES),
        settings=_settings(rng, rates),
        reward=render_rubric(rubric, rng),
        span=f"{lo}, {lo + rng.randint(0, 4)}",
    )
    _slip(draft, rubric, rng, rates)
    return draft


def _settings(rng: random.Random, rates: DemoRates) -> list[list[str]]:
    if rng.random() >= rates.settings:
        return []
    steps = rng.choice((2, 4, 6, 8, 10, 12, 16))
    batch = rng.choice([size for size in (32, 64, 128, 256) if size * steps <= MAX_ROLLOUTS])
    values = {
        "lr": rng.choices([name for name, _ in _RATES], [share for _, share in _RATES])[0],
        "max_steps": str(steps),
        "batch_size": str(batch),
        "group_size": str(rng.choice((2, 4, 8, 16))),
        "temperature": rng.choice(("0.7", "1.0", "1.3")),
        "optimizer": rng.choices(('"adamw"', '"sgd"', '"muon"'), (0.88, 0.06, 0.06))[0],
    }
    kept = [[key, value] for key, value in values.items() if rng.random() < rates.each_setting]
    keys = {key for key, _ in kept}
    if "max_steps" in keys and "batch_size" not in keys and steps * 64 > MAX_ROLLOUTS:
        kept = [pair for pair in kept if pair[0] != "max_steps"]
    if "batch_size" in keys and "max_steps" not in keys and batch * 8 > MAX_ROLLOUTS:
        kept = [pair for pair in kept if pair[0] != "batch_size"]
    return kept


def _slip(draft: _Draft, rubric: Rubric, rng: random.Random, rates: DemoRates) -> None:
    """Plant mistakes; each is remembered with its cure."""
    slips = draft.slips
    if rubric.is_refused:
        slips["rubric"] = (_TASKSET, draft.reward, "")
    _slip_settings(draft, rng, rates)
    if rng.random() < rates.syntax:
        _slip_line(draft, rng, "syntax")
    elif rng.random() < rates.name and "self.data.answer" in draft.reward:
        _slip_line(draft, rng, "name")
    if rng.random() < rates.gap:
        gap, text = rng.choice(((RANGE_GAP, draft.span), (REWARDS_GAP, draft.reward)))
        if "syntax" not in slips and "name" not in slips:
            slips["gap"] = (_TASKSET, gap, text)
    if rng.random() < rates.forget:
        slips["forget"] = ("job.toml", "", "")


def _slip_settings(draft: _Draft, rng: random.Random, rates: DemoRates) -> None:
    named = {key for key, _ in draft.settings}
    roll = rng.random()
    for kind in ("key", "bounds", "divide", "budget"):
        chance = getattr(rates, kind)
        if roll >= chance:
            roll -= chance
            continue
        if kind == "key":
            places = [pair for pair in draft.settings if pair[0] in _KEY_SLIPS]
            if places:
                pair = rng.choice(places)
                wrong, right = _KEY_SLIPS[pair[0]], pair[0]
                pair[0] = wrong
                draft.slips["key"] = ("job.toml", f"{wrong} =", f"{right} =")
        elif kind == "bounds":
            places = [pair for pair in draft.settings if pair[0] in _BOUND_SLIPS]
            if places:
                pair = rng.choice(places)
                _rewrite(draft, pair, rng.choice(_BOUND_SLIPS[pair[0]]), "bounds")
        elif kind == "divide" and "group_size" in named:
            pair = next(p for p in draft.settings if p[0] == "group_size")
            _rewrite(draft, pair, rng.choice(("3", "5", "6", "10", "12")), "divide")
        elif kind == "budget" and {"batch_size", "max_steps"} <= named:
            pair = next(p for p in draft.settings if p[0] == "max_steps")
            size = next(p for p in draft.settings if p[0] == "batch_size")
            size[1], pair[1] = rng.choice(("128", "256")), "4"
            _rewrite(draft, pair, rng.choice(("12", "16")), "budget")
        return


def _rewrite(draft: _Draft, pair: list[str], wrong: str, slip: str) -> None:
    key, right = pair
    pair[1] = wrong
    draft.slips[slip] = ("job.toml", f"{key} = {wrong}\n", f"{key} = {right}\n")


def _slip_line(draft: _Draft, rng: random.Random, slip: str) -> None:
    """Break one line of the rubric: a lost bracket or colon, or a name without its owner."""
    lines = draft.reward.splitlines()
    if slip == "name":
        choices = [
            (line, line.replace("self.data.answer", "answer"))
            for line in lines
            if "self.data.answer" in line
        ]
    else:
        choices = [(line, line[:-1]) for line in lines if line.endswith((":", ")"))]
    right, wrong = rng.choice(choices)
    draft.reward = draft.reward.replace(right + "\n", wrong + "\n", 1)
    draft.slips[slip] = (_TASKSET, wrong + "\n", right + "\n")
    if "rubric" in draft.slips:
        draft.slips["rubric"] = (_TASKSET, draft.reward.replace(wrong + "\n", right + "\n", 1), "")


def _look_around(rng: random.Random) -> list[str]:
    calls = []
    if rng.random() < 0.15:
        calls.append(render_call("list_files", {}))
    if rng.random() < 0.06:
        calls.append(render_call("read_file", {"path": _TASKSET}))
    rng.shuffle(calls)
    return calls


def _higher(scores: str) -> str:
    """The base that the answer names first: `best: micro`."""
    return scores.splitlines()[0].removeprefix("best: ")


def _first_version(draft: _Draft, rng: random.Random, *, base_first: bool) -> list[str]:
    gap = draft.slips.get("gap", ("", "", ""))[1]
    calls = []
    if gap != RANGE_GAP:
        calls.append(_edit(_TASKSET, RANGE_GAP, draft.span))
    if gap != REWARDS_GAP:
        calls.append(_edit(_TASKSET, REWARDS_GAP, draft.reward))
    if "forget" not in draft.slips:
        toml = render_call("write_file", {"path": "job.toml", "content": draft.toml()})
        calls.insert(0 if base_first or rng.random() < 0.3 else len(calls), toml)
    return calls


def _repair(draft: _Draft, result: str, rng: random.Random, rates: DemoRates) -> list[str]:
    """The edits that answer the last message; now and then they do not help."""
    if "max_turns is" in result:
        old, draft.span = draft.span, rng.choice(("1, 2", "1, 3", "2, 3"))
        return [_edit(_TASKSET, f"LO, HI = {old}", f"LO, HI = {draft.span}")]
    found = next((slip for slip in _STAGES if slip in draft.slips), None)
    if found is None:  # accepted by our own rules, refused by the probe: start the rubric afresh
        return [render_call("read_file", {"path": _TASKSET})]
    calls = []
    for slip in _FOUND_TOGETHER.get(found, (found,)):
        if slip not in draft.slips:
            continue
        if rng.random() < rates.bad_repair:
            calls += _bad_repair(draft, slip, rng)
            continue
        calls.append(_cure(draft, slip, rng))
        del draft.slips[slip]
    return calls


def _cure(draft: _Draft, slip: str, rng: random.Random) -> str:
    path, wrong, right = draft.slips[slip]
    if slip == "forget":
        return render_call("write_file", {"path": "job.toml", "content": draft.toml()})
    if slip == "rubric":
        right = render_rubric(RUBRICS[rng.choice(("exact", "formed"))], rng)
    elif path == "job.toml":
        _apply(draft, wrong, right)
    return _edit(path, wrong, right)


def _bad_repair(draft: _Draft, slip: str, rng: random.Random) -> list[str]:
    """Looks again, or swaps one mistake for another of its kind."""
    path, wrong, right = draft.slips[slip]
    if slip in ("bounds", "budget", "divide") and rng.random() < 0.6:
        key = right.split(" =")[0]
        options = {
            "bounds": _BOUND_SLIPS.get(key, ()),
            "budget": ("10", "14"),
            "divide": ("3", "6", "7"),
        }
        others = [value for value in options[slip] if f"{key} = {value}\n" != wrong]
        if others:
            other = f"{key} = {rng.choice(others)}\n"
            _apply(draft, wrong, other)
            draft.slips[slip] = (path, other, right)
            return [_edit(path, wrong, other)]
    if slip == "forget":
        return [render_call("list_files", {})]
    return [render_call("read_file", {"path": "job.toml"})] if path == "job.toml" else []


def _apply(draft: _Draft, wrong: str, right: str) -> None:
    """Keep the draft's settings in step with an edit of job.toml."""
    for pair in draft.settings:
        if f"{pair[0]} = {pair[1]}\n" == wrong:
            pair[1] = right.rstrip("\n").split(" = ")[1]
        elif f"{pair[0]} =" == wrong:
            pair[0] = right.removesuffix(" =")


def _edit(path: str, old: str, new: str) -> str:
    return render_call("edit_file", {"path": path, "old": old, "new": new})
