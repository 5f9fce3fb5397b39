"""The card of an exported agent: everything in it is read from the run."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import tomli_w

from nestling import __version__
from nestling.outer.stats import Estimate
from nestling.outer.step_report import StepReport
from nestling.outer.store_log import step_reports, sweeps
from nestling.outer.sweep_report import ALL_FAMILIES, Sweep
from nestling.store import RunStore

__all__ = ["CardFacts", "read_facts", "render_card"]

_FACTS: Final = ("run.name", "run.version", "run.commit", "run.machine", "run.jail")
_COMMITMENT: Final = "commitment."
_SPLITS: Final = ("a", "b", "c")
_LIBRARIES: Final = ("torch", "numpy", "tokenizers", "safetensors", "verifiers")
_LICENCE: Final = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)
_UNKNOWN: Final = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a run says of its agent."""

    step: int
    version: int
    recipe: dict[str, Any]
    recipe_text: str
    meta: dict[str, str]
    """Facts that the start of the run noted; some may be missing."""
    reports: tuple[StepReport, ...]
    """Up to the exported step."""
    sweep: Sweep | None
    """The last one that measured these weights or earlier ones."""
    sweep_step: int | None
    usd: float | None
    """Of the whole run; None when nothing was accounted."""
    minutes: float

    @property
    def temperature(self) -> float | None:
        """At which the agent was trained and measured."""
        value = self.recipe.get("outer", {}).get("temperature")
        return float(value) if isinstance(value, int | float) else None


def read_facts(store: RunStore, recipe: dict[str, Any], *, step: int, version: int) -> CardFacts:
    """Collect them; raises `StoreError` when the run is damaged."""
    measured = {at: sweep for at, sweep in sweeps(store).items() if at <= step}
    last = max(measured, default=None)
    total = store.money.total()
    spent = store.money.spent_by("machine")
    keys = (*_FACTS, *(f"{_COMMITMENT}{split}" for split in _SPLITS))
    return CardFacts(
        step=step,
        version=version,
        recipe=recipe,
        recipe_text=tomli_w.dumps(recipe),
        meta={key: text for key in keys if (text := store.meta(key))},
        reports=tuple(one for one in step_reports(store) if one.step <= step),
        sweep=None if last is None else measured[last],
        sweep_step=last,
        usd=total.spent_microusd / 1e6 if spent else None,
        minutes=sum(seconds for _, seconds in spent.values()) / 60,
    )


def render_card(
    facts: CardFacts,
    *,
    kind: str,
    params: int,
    base: Path | None,
    command: str,
    kept: float = 1.0,
    alone: bool = False,
) -> str:
    """The card as Markdown with the front matter that model hubs read.

    `kept` below 1: the adapter is the nearest to a training of all weights, and holds that share of its
    change. `alone`: the base is not beside the adapter.
    """
    licence = _licence(base)
    library = "peft" if kind == "adapter" else "transformers"
    name = facts.meta.get("run.name", "agent")
    base_name = str(facts.recipe.get("agent", {}).get("model", _UNKNOWN))
    what = "LoRA adapter" if kind == "adapter" else "model"
    sections = (
        f"---\nlicense: {licence or 'other'}\nlibrary_name: {library}\n"
        f"pipeline_tag: text-generation\n---",
        f"# {name}, step {facts.step}",
        f"An agent that writes training jobs for small models through tool calls: {what} of "
        f"{params:,} parameters, {facts.version} updates on top of `{base_name}`. Sample it at "
        f"temperature {_or_unknown(facts.temperature)}, which is part of its definition.",
        *_nearness(kept),
        "## Scores\n" + "\n".join(_scores(facts)),
        "## How it was made\n" + "\n".join(_making(facts, licence)),
        "## Use\n" + _use(kind, base_name if alone else None),
        "## Commands\n```sh\nnestling run recipe.toml"
        + (f"\n{command}" if command else "")
        + "\n```",
        f"## Recipe\n```toml\n{facts.recipe_text.strip()}\n```",
    )
    return "\n\n".join(sections) + "\n"


def _nearness(kept: float) -> Iterator[str]:
    if kept < 1.0:
        yield (
            f"The run trained all weights. This is the nearest adapter: it holds {kept:.1%} of what changed "
            f"(sum of squares over all weights), and the scores below are those of all weights."
        )


def _scores(facts: CardFacts) -> Iterator[str]:
    if facts.sweep is None:
        yield "No sweep has measured this agent."
    else:
        kind = facts.recipe.get("reward", {}).get("kind", _UNKNOWN)
        yield (
            f"Sweep after step {facts.sweep_step}: paired tasks and seeds for every row, real jobs, "
            f"reward `{kind}`; intervals are cluster bootstraps of the mean."
        )
        if facts.sweep_step != facts.step:
            yield "These exact weights were not measured; the sweep is of an earlier step."
        yield ""
        yield "| policy | family | n | reward | interval | valid | dead |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for one in facts.sweep.results:
            summary = one.summary
            cells = ("0", "-", "-", "-")
            if summary is not None:
                cells = (
                    str(summary.n),
                    f"{summary.reward.mean:.3f}",
                    _interval(summary.reward),
                    f"{summary.validity:.0%}",
                )
            yield f"| {one.arm} | {one.family} | {' | '.join(cells)} | {one.dead} |"
        yield from _differences(facts.sweep)
    yield from _training(facts.reports)


def _differences(sweep: Sweep) -> Iterator[str]:
    pooled = [one for one in sweep.comparisons if one.family == ALL_FAMILIES]
    if pooled:
        yield ""
    for one in pooled:
        found = one.difference
        p_value = "" if found.p_value is None else f", p {found.p_value:.4f}"
        yield (
            f"- {one.arm} minus {one.against}, all families: {found.mean:+.3f} "
            f"({_interval(found)}, n = {found.n} pairs{p_value})"
        )


def _training(reports: Sequence[StepReport]) -> Iterator[str]:
    counted = [one for one in reports if one.summary is not None]
    if not counted:
        return
    yield ""
    ends = {"first": counted[0], "last": counted[-1]} if len(counted) > 1 else {"only": counted[0]}
    for label, one in ends.items():
        assert one.summary is not None
        reward = one.summary.reward
        yield (
            f"- In training, {label} step ({one.step}): mean reward {reward.mean:.3f} "
            f"({_interval(reward)}, n = {one.summary.n})"
        )


def _making(facts: CardFacts, licence: str | None) -> Iterator[str]:
    families = facts.recipe.get("families", {})
    training = ", ".join(families.get("training", ())) or _UNKNOWN
    held_out = ", ".join(families.get("held_out", ())) or "none"
    reports = facts.reports
    yield (
        f"- Data: {sum(one.episodes for one in reports):,} episodes of its own on the families "
        f"{training}; {sum(one.agent_tokens for one in reports):,} sampled tokens. Held out: "
        f"{held_out}."
    )
    yield (
        f"- Training: {facts.step} steps, {facts.version} updates, "
        f"{sum(one.step_s for one in reports) / 60:.0f} minutes of wall clock."
    )
    cost = _UNKNOWN if facts.usd is None else f"{facts.usd:.4f} USD"
    yield f"- Cost of the run's jobs: {cost}, {facts.minutes:.0f} minutes of workers."
    meta = facts.meta
    yield f"- Machine: {meta.get('run.machine', _UNKNOWN)}. Jail: {meta.get('run.jail', _UNKNOWN)}."
    yield (
        f"- Versions: nestling {meta.get('run.version', _UNKNOWN)}, commit "
        f"{meta.get('run.commit', _UNKNOWN)}; exported by nestling {__version__} with {_versions()}."
    )
    for split in _SPLITS:
        sealed = meta.get(f"{_COMMITMENT}{split}")
        if sealed:
            yield f"- Commitment to hidden set {split}: `{sealed}`."
    yield f"- Licence: {licence or 'that of the model it was trained from, which states none here'}."


def _use(kind: str, base_name: str | None) -> str:
    """`base_name`: the model that an adapter without its base belongs to, as a recipe names it."""
    lines = ["```sh"]
    if base_name is None:
        lines += ["nestling serve FOLDER                        # OpenAI-compatible, with tools"]
    lines += [
        "nestling eval-agent --agents embedded:FOLDER",
        "nestling run RECIPE --set agent.model=FOLDER",
    ]
    if base_name is not None:
        return "\n".join(
            [*lines, "```", f"The base is `{base_name}`, which Nestling finds by that name."]
        )
    lines += ["```", "```python", "from transformers import AutoModelForCausalLM"]
    if kind == "adapter":
        lines += [
            "from peft import PeftModel",
            'base = AutoModelForCausalLM.from_pretrained("FOLDER/base")',
            'model = PeftModel.from_pretrained(base, "FOLDER")',
        ]
    else:
        lines += ['model = AutoModelForCausalLM.from_pretrained("FOLDER")']
    return "\n".join([*lines, "```"])


def _versions() -> str:
    found: Mapping[str, str] = {
        "Python": platform.python_version(),
        **{name: _installed(name) for name in _LIBRARIES},
    }
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _licence(base: Path | None) -> str | None:
    """As the base's card states it."""
    card = None if base is None else base / "README.md"
    if card is None or not card.is_file():
        return None
    found = _LICENCE.search(card.read_text("utf-8", errors="replace"))
    return found.group(1) if found else None


def _interval(estimate: Estimate) -> str:
    if estimate.lo is None or estimate.hi is None:
        return "no interval"
    return f"{estimate.lo:.3f} to {estimate.hi:.3f}"


def _or_unknown(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:g}"
