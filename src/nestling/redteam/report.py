"""What the cases found, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nestling.redteam.case import Case, Finding

__all__ = ["case_list_markdown", "finding_line", "findings_json", "summary_line"]


def finding_line(finding: Finding) -> str:
    """One finding as two lines of a terminal."""
    verdict = "SUCCEEDED" if finding.succeeded else "held"
    lines = [
        f"{verdict:9} {finding.id}: {finding.act}",
        f"          expected: {finding.expected}",
        f"          happened: {finding.happened}",
    ]
    if finding.evidence:
        lines.append(f"          evidence: {finding.evidence[:160]}")
    return "\n".join(lines)


def summary_line(findings: Sequence[Finding], seconds: float) -> str:
    """The attack success rate, and which succeeded."""
    winners = [finding.id for finding in findings if finding.succeeded]
    won = len(winners)
    kinds = len({finding.kind for finding in findings})
    share = 100 * won / len(findings) if findings else 0.0
    return (
        f"{won} of {len(findings)} attacks of {kinds} kinds succeeded ({share:.1f} %), "
        f"{seconds:.0f} s" + (f": {', '.join(winners)}" if winners else "")
    )


def findings_json(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The stable form: `cases` and `seconds`."""
    fields = {"id", "kind", "expected", "happened", "succeeded"}
    return {
        "cases": [finding.model_dump(include=fields) for finding in findings],
        "seconds": round(seconds, 1),
    }


def case_list_markdown(cases: Iterable[Case]) -> str:
    """All cases as one table per kind."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    parts = []
    for kind, members in kinds.items():
        rows = [f"| `{case.id}` | {_cell(case.act)} | {_cell(case.expected)} |" for case in members]
        head = f"### {kind.capitalize()} ({len(members)})\n\n| case | act | defence |\n| --- | --- | --- |"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
