"""One episode from beginning to end: what was said, what was submitted, what it was worth."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nestling.agent.episode_result import EpisodeResult
from nestling.core.errors import ConfigError, Problem
from nestling.core.rundir import RunDir
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall, parse_turn
from nestling.jobs.outcome import SampleRollout
from nestling.jobs.template import starting_files
from nestling.report.episode_rows import read_result
from nestling.report.samples import submitted_files
from nestling.store import RunStore
from nestling.store.episodes import EpisodeRecord

__all__ = ["Diff", "DiffLine", "Said", "Story", "Submission", "Turn", "read_story", "said_in"]

_CONTEXT_LINES = 3
_MAX_DIFF_LINES = 600
_TURN = re.compile(r"<\|im_start\|>(\w+)\n")
_TURN_END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of a unified diff."""

    kind: Literal["add", "remove", "same", "place"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What happened to one file."""

    path: str
    change: Literal["new", "changed", "gone"]
    lines: tuple[DiffLine, ...]
    num_left: int
    """Lines beyond those shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One call of submit_job."""

    number: int
    ok: bool
    base_model: str | None
    settings: Mapping[str, str]
    problems: tuple[Problem, ...]
    job_hash: str | None
    diffs: tuple[Diff, ...] | None
    """Against the submission before it, or the starting files; None when its files were not kept."""
    files: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One entry of the transcript, taken apart."""

    number: int | None
    """Of the agent's turns, from 1; None for prompts."""
    role: str
    text: str
    """Of an agent's turn: what it said beside the call."""
    tool: str | None
    arguments: Mapping[str, str]
    """Of a proper call, as text."""
    problem: str | None
    """Why a call is none."""
    answer: str | None
    tokens: int
    truncated: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a small model's rollout."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One episode. All its text was written by the agent, its job or its tools: never trust it."""

    record: EpisodeRecord
    result: EpisodeResult | None
    """None while it runs, and when it broke."""
    turns: tuple[Turn, ...]
    submissions: tuple[Submission, ...]
    verdict: str
    died: tuple[str, ...]
    """Reasons of the times it broke down."""


def read_story(folder: RunDir, store: RunStore, episode_id: str) -> Story:
    """The episode as far as it came; raises `StoreError` when there is none."""
    record = store.episodes.get(episode_id)
    result = read_result(store, record) if record.state == "finished" else None
    died = tuple(
        str(event.data.get("reason", ""))
        for event in store.events.of(episode_id)
        if event.kind in ("episode.died", "episode.failed")
    )
    if result is None:
        told = store.episodes.turns(episode_id)
        turns = tuple(
            _turn(one.idx + 1, one.text, one.observation, len(one.ids or ()), one.truncated)
            for one in told
        )
        verdict = "It broke down." if record.state == "failed" else "It is still being played."
        return Story(
            record=record, result=None, turns=turns, submissions=(), verdict=verdict, died=died
        )
    return Story(
        record=record,
        result=result,
        turns=tuple(_transcript(result)),
        submissions=tuple(_submissions(folder, store, result)),
        verdict=_verdict(result),
        died=died,
    )


def said_in(sample: SampleRollout) -> list[Said]:
    """A rollout of the small model message by message; text without markup is one message."""
    parts = _TURN.split(sample.text)
    found = [Said("", parts[0].strip())] if parts[0].strip() else []
    for role, text in zip(parts[1::2], parts[2::2], strict=True):
        clean = text.replace(_TURN_END, "").strip()
        is_answer = role == "user" and clean.startswith("<tool_response>")
        clean = clean.removeprefix("<tool_response>").removesuffix("</tool_response>").strip()
        found.append(Said("tool" if is_answer else role, clean))
    return found


def _transcript(result: EpisodeResult) -> list[Turn]:
    turns: list[Turn] = []
    number = 0
    for one in result.turns:
        if one.role == "assistant":
            number += 1
            turns.append(_turn(number, one.text, one.result, one.tokens, one.truncated))
        else:
            turns.append(
                Turn(
                    number=None,
                    role=one.role,
                    text=one.text,
                    tool=None,
                    arguments={},
                    problem=None,
                    answer=None,
                    tokens=0,
                    truncated=False,
                    raw=one.text,
                )
            )
    return turns


def _turn(number: int, raw: str, answer: str | None, tokens: int, truncated: bool) -> Turn:
    text, tool, arguments, problem = raw, None, dict[str, str](), None
    match parse_turn(raw.removesuffix(_TURN_END)):
        case ToolCall(name=name, arguments=given, text_before=before):
            text, tool = before.strip(), name
            arguments = {key: str(value) for key, value in given.items()}
        case MalformedCall(reason=reason):
            problem = reason
        case FinalAnswer():
            pass
    return Turn(
        number=number,
        role="assistant",
        text=text,
        tool=tool,
        arguments=arguments,
        problem=problem,
        answer=answer,
        tokens=tokens,
        truncated=truncated,
        raw=raw,
    )


def _submissions(folder: RunDir, store: RunStore, result: EpisodeResult) -> list[Submission]:
    before: Mapping[str, str] = _starting_files(result.family)
    found = []
    for attempt in result.attempts:
        files = submitted_files(folder, store, attempt.job_hash) if attempt.job_hash else None
        manifest = attempt.manifest
        found.append(
            Submission(
                number=attempt.number,
                ok=attempt.ok,
                base_model=manifest.base_model if manifest else None,
                settings={k: str(v) for k, v in manifest.prime_rl.items()} if manifest else {},
                problems=attempt.problems,
                job_hash=attempt.job_hash,
                diffs=None if files is None else tuple(_diffs(before, files)),
                files=files,
            )
        )
        before = files or before
    return found


def _starting_files(family: str) -> dict[str, str]:
    """What the agent could change of what lay there; nothing for a family we do not know."""
    try:
        files = starting_files(family)
    except ConfigError:
        return {}
    return {path: text for path, text in files.items() if not path.startswith("tools/")}


def _diffs(before: Mapping[str, str], after: Mapping[str, str]) -> list[Diff]:
    found = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        lines = list(_diff_lines((old or "").splitlines(), (new or "").splitlines()))
        found.append(
            Diff(
                path=path,
                change="new" if old is None else "gone" if new is None else "changed",
                lines=tuple(lines[:_MAX_DIFF_LINES]),
                num_left=max(0, len(lines) - _MAX_DIFF_LINES),
            )
        )
    return found


def _diff_lines(old: Sequence[str], new: Sequence[str]) -> list[DiffLine]:
    lines = []
    unified = difflib.unified_diff(old, new, lineterm="", n=_CONTEXT_LINES)
    for number, text in enumerate(unified):
        if number < 2:
            continue  # the names of the files
        match text[:1]:
            case "+":
                lines.append(DiffLine("add", text[1:]))
            case "-":
                lines.append(DiffLine("remove", text[1:]))
            case "@":
                lines.append(DiffLine("place", text))
            case _:
                lines.append(DiffLine("same", text[1:]))
    return lines


def _verdict(result: EpisodeResult) -> str:
    """What became of it, in one sentence or two."""
    outcome, number = result.outcome, result.valid_attempt
    if number is None:
        last = result.attempts[-1].problems if result.attempts else ()
        why = f" The last one: {last[0].wrong}." if last else ""
        count = len(result.attempts)
        ends = {
            "attempts_used_up": "All submissions were refused.",
            "max_turns": "The turns ran out before a job was accepted.",
            "no_call": "The agent stopped calling tools before a job was accepted.",
            "malformed_calls": "The agent's calls could not be read.",
            "context_full": "The conversation no longer fitted the agent's context.",
        }
        end = ends.get(result.outcome_code, f"The machinery failed: {result.detail or '?'}.")
        return f"{end} {count} submission{'' if count == 1 else 's'} refused.{why}"
    accepted = f"Accepted at submission {number}."
    if outcome is None:
        return f"{accepted} No outcome of the job is recorded."
    if outcome.post is None or outcome.best_pre is None or result.outcome_code != "job_succeeded":
        return f"{accepted} The job {outcome.status.replace('_', ' ')}: {outcome.reason}."
    gain = outcome.post - outcome.best_pre
    low, high = outcome.uplift_ci or (gain, gain)
    shown = "better than" if low > 0 else "worse than" if high < 0 else "not told apart from"
    return (
        f"{accepted} {outcome.base_model} trained for {outcome.train_steps} steps and scored "
        f"{outcome.post:.3f} where the best untrained base scores {outcome.best_pre:.3f}: "
        f"{shown} it on {outcome.n} hidden items."
    )
