"""What the agent is told: rendered from the numbers that are enforced, so that they cannot disagree.

`compact` is for tiny models: about 300 tokens, the tools named in one line. `full` is for large ones:
schemas, all rules, the reward explained from its weights. Both get the same folder of files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nestling.agent.reward import RewardKind, RewardWeights
from nestling.agent.tool_schemas import TOOL_SCHEMAS, tool_line
from nestling.agent.workspace import READ_ONLY_HINT, WRITABLE_HINT, WorkspaceLimits
from nestling.families.family import Family, Item
from nestling.jobs.bounds import SMALL, Bounds, bounds_line, bounds_table_markdown

__all__ = ["AgentPrompt", "PromptRules", "PromptStyle", "document_files", "render_prompt"]

PromptStyle = Literal["compact", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPrompt:
    """What a policy is started with."""

    system: str
    user: str
    tool_schemas: tuple[dict[str, Any], ...]
    """OpenAI function form."""
    style: PromptStyle
    family: str
    """For scripted policies and records; models read it in `user`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """Everything enforced elsewhere that the agent is told about."""

    bounds: Bounds = SMALL
    weights: RewardWeights = field(default_factory=RewardWeights)
    reward_kind: RewardKind = "seed"
    max_turns: int = 16
    workspace: WorkspaceLimits = field(default_factory=WorkspaceLimits)


def render_prompt(
    family: Family,
    examples: Sequence[Item],
    gaps: str,
    *,
    style: PromptStyle = "compact",
    rules: PromptRules | None = None,
) -> AgentPrompt:
    """The opening of an episode.

    Args:
        family: what the job must teach.
        examples: dev items; never hidden ones.
        gaps: what the template leaves open, in one line.
        style: compact for tiny models, full for large ones.
        rules: the enforced numbers.
    """
    used = rules or PromptRules()
    make = _compact if style == "compact" else _full
    system, user = make(family, examples, gaps, used)
    return AgentPrompt(
        system=system, user=user, tool_schemas=TOOL_SCHEMAS, style=style, family=family.name
    )


def document_files(
    family: Family, examples: Sequence[Item], rules: PromptRules | None = None
) -> dict[str, str]:
    """INSTRUCTIONS.md and TASK.md of a workspace."""
    used = rules or PromptRules()
    return {
        "INSTRUCTIONS.md": _instructions(used),
        "TASK.md": _task(family, examples),
    }


def _compact(
    family: Family, examples: Sequence[Item], gaps: str, rules: PromptRules
) -> tuple[str, str]:
    system = f"You write training jobs for small models. Tools: {tool_line()}. One call per turn."
    lines = [
        f"family: {family.name}",
        family.spec,
        f"tools: {_without_types(family.tool_signatures)}",
        bounds_line(rules.bounds),
        gaps,
        f"{rules.weights.max_attempts} submissions.",
        *_example_lines(examples),
    ]
    return system, "\n".join(line for line in lines if line)


def _without_types(signatures: str) -> str:
    """`f(a: str)` as `f(a)`: tiny models learn the types from examples and pay for every token."""
    return re.sub(r": \w+", "", signatures)


def _full(
    family: Family, examples: Sequence[Item], gaps: str, rules: PromptRules
) -> tuple[str, str]:
    system = (
        "You are a research engineer. You write one reinforcement-learning training job for a small "
        "language model: a job.toml and a verifiers environment with data, tools and a rubric. "
        f"You work in a folder through tools ({tool_line()}), one call per turn, and finish with "
        "submit_job(). A turn without a tool call ends the episode."
    )
    user = "\n\n".join(
        (
            _task(family, examples).strip(),
            _instructions(rules).strip(),
            "## Template\n\n" + (gaps or "The folder holds a complete template; improve it."),
            "The same text is in INSTRUCTIONS.md and TASK.md. list_files() shows the folder.",
        )
    )
    return system, user


def _task(family: Family, examples: Sequence[Item]) -> str:
    lo, hi = family.eval_range
    shown = "\n".join(_example_lines(examples)) or "(none)"
    return f"""# Task: {family.name}

{family.spec}

- Tools of the small model: `{family.tool_signatures}`.
- The hidden eval asks items of difficulty {lo} to {hi}, made by the same rules as the examples below.
- The small model must end with a turn that is exactly `ANSWER: <value>`; only the right value counts.

## Examples

{shown}
"""


def _example_lines(examples: Sequence[Item]) -> list[str]:
    return [f"example: {item.prompt} -> {item.answer}" for item in examples]


def _instructions(rules: PromptRules) -> str:
    weights, limits = rules.weights, rules.workspace
    return f"""# Instructions

Write a training job. It runs for real: GRPO trains the base model you choose on your environment, then
the trained model is scored on a hidden eval that you never see.

- Write {WRITABLE_HINT}. {READ_ONLY_HINT} are read-only.
- At most {limits.max_files} files, {limits.max_file_bytes} bytes a file, {limits.max_total_bytes} in all.
- get_baseline_scores() names the best untrained base model and gives the score of each.
- submit_job() freezes the folder and probes it. Problems come back as messages; after
  {weights.max_attempts} failed submissions the episode ends. The first valid one is trained.
- At most {rules.max_turns} turns, one tool call each. A turn without a call ends the episode.
- Training data must be your own: hidden or example items in it are refused.

## job.toml

{bounds_table_markdown(rules.bounds)}

## Reward

{_reward_text(rules)}
"""


def _reward_text(rules: PromptRules) -> str:
    weights = rules.weights
    by_attempt = ", ".join(f"{share:g}" for share in weights.by_attempt)
    lines = [
        f"reward = {weights.validation:g} * validation + {weights.quality:g} * quality"
        f" + {weights.speed:g} * speed",
        "",
        f"- validation: {by_attempt} for a job valid at attempt"
        f" 1 to {weights.max_attempts}; 0 if none is valid.",
    ]
    if rules.reward_kind == "seed":
        lines += [
            f"- quality: {weights.post_share:g} * post + {1 - weights.post_share:g} * uplift, where post"
            " is the trained model's hidden score and best_pre that of the best untrained base model."
            " Above best_pre, uplift is (post - best_pre) / (1 - best_pre); below,"
            " (post - best_pre) / best_pre, at least -1.",
            "- A job that dies has quality 0 and speed 0 and keeps its validation.",
            "- speed: 1 minus the share of the allowed rollouts used, if the job succeeded.",
        ]
    else:
        lines += [
            "- quality: what training is shown to have added over best_pre, the score of the best"
            " untrained base model on the same items: the end of the 95 % interval of"
            " post - best_pre that is nearer to 0, divided by 1 - best_pre when positive and by"
            " best_pre when negative; 0 if the interval covers 0 or the weights did not change.",
            "- A job that dies has quality 0 and speed 0; if your own code killed it, validation is 0"
            " too.",
            "- speed: 1 minus the share of the allowed rollouts used, only if quality is above 0.",
        ]
    lines.append(
        f"- Without one readable submission the whole reward is {weights.no_submission:g}."
    )
    return "\n".join(lines)
