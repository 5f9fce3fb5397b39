"""Prompts say what is enforced, briefly for tiny models."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nestling.agent.prompt import PromptRules, document_files, render_prompt
from nestling.agent.reward import RewardWeights
from nestling.agent.starting_files import episode_examples, template_gaps, workspace_files
from nestling.agent.tool_schemas import TOOL_NAMES
from nestling.families.family import Family
from nestling.families.registry import ALL, get
from nestling.jobs.bounds import SMALL
from nestling.jobs.template import RANGE_GAP


@pytest.mark.parametrize("name", ALL)
def test_compact_prompt_is_short_and_complete(name: str) -> None:
    family = get(name)
    examples = episode_examples(family, 7, 2)
    prompt = render_prompt(family, examples, template_gaps())
    assert all(tool in prompt.system for tool in TOOL_NAMES)
    assert f"family: {name}" in prompt.user
    assert family.spec in prompt.user
    assert re.sub(": [a-z]+", "", family.tool_signatures) in prompt.user
    assert "lr 1e-5..3e-3" in prompt.user
    assert "max_steps*batch_size <= 1024" in prompt.user
    assert RANGE_GAP in prompt.user
    assert "3 submissions." in prompt.user
    assert prompt.user.count("\nexample: ") == 2
    assert f"example: {examples[0].prompt} -> {examples[0].answer}" in prompt.user
    assert len(prompt.system) + len(prompt.user) < 1800


def test_full_prompt_explains_reward_and_all_keys(ledger: Family) -> None:
    prompt = render_prompt(ledger, episode_examples(ledger, 7, 4), template_gaps(), style="full")
    assert "0.35 * validation + 0.6 * quality + 0.05 * speed" in prompt.user
    assert "1, 0.8, 0.6 for a job valid at attempt 1 to 3" in prompt.user
    assert "0.25 * post + 0.75 * uplift" in prompt.user
    assert "-0.1" in prompt.user
    assert all(f"`{key.name}`" in prompt.user for key in SMALL.keys)
    assert len(prompt.tool_schemas) == len(TOOL_NAMES)


def test_changed_rules_change_every_text(ledger: Family) -> None:
    rules = PromptRules(
        weights=RewardWeights(
            validation=0.2, quality=0.7, speed=0.1, by_attempt=(1.0, 0.5), no_submission=-0.3
        ),
        bounds=replace(SMALL, max_rollouts=512),
        reward_kind="paired",
        max_turns=9,
    )
    compact = render_prompt(ledger, [], template_gaps(), rules=rules)
    assert "2 submissions." in compact.user
    assert "<= 512" in compact.user
    text = document_files(ledger, [], rules)["INSTRUCTIONS.md"]
    for part in (
        "0.2 * validation + 0.7 * quality + 0.1 * speed",
        "1, 0.5 for a job valid at attempt 1 to 2",
        "is -0.3",
        "At most 9 turns",
        "at most 512",
        "95 % interval",
    ):
        assert part in text
    assert "0.25 * post" not in text


def test_examples_depend_on_the_task_seed_alone(ledger: Family) -> None:
    assert episode_examples(ledger, 5, 2) == episode_examples(ledger, 5, 2)
    assert episode_examples(ledger, 5, 2) != episode_examples(ledger, 6, 2)
    assert episode_examples(ledger, 5, 0) == []


@pytest.mark.parametrize("name", ALL)
def test_workspace_holds_documents_tools_and_template(name: str) -> None:
    family = get(name)
    files = workspace_files(family, episode_examples(family, 1, 2), PromptRules())
    assert {"INSTRUCTIONS.md", "TASK.md", "tools/__init__.py", "environment/__init__.py"} <= set(
        files
    )
    assert RANGE_GAP in files["environment/taskset.py"]
    assert "job.toml" not in files
