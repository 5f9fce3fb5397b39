"""The list of attacks, how one is judged, and that none succeeds."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from nestling.cli.redteam import command
from nestling.core.errors import ConfigError
from nestling.redteam.canary import Canary
from nestling.redteam.case import Case, Happened
from nestling.redteam.cases import ALL
from nestling.redteam.report import finding_line, findings_json, summary_line
from nestling.redteam.run import run_all, select


def test_there_are_many_cases_of_many_kinds():
    assert len(ALL) >= 60
    assert len({case.kind for case in ALL}) >= 10
    assert len({case.id for case in ALL}) == len(ALL)
    for case in ALL:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", case.id)
        assert case.act
        assert case.expected


def test_cases_are_chosen_by_id_kind_or_wildcard():
    assert [case.id for case in select(["jail-read-home"])] == ["jail-read-home"]
    assert {case.kind for case in select(["network"])} == {"network"}
    assert {case.id.split("-")[0] for case in select(["net-*", "bomb-*"])} == {"net", "bomb"}
    assert select() == list(ALL)
    with pytest.raises(ConfigError, match=r"no red-team case matches nothing-\*"):
        select(["net-*", "nothing-*"])


def test_a_crash_of_trusted_code_counts_as_a_success_of_the_attack():
    def attack(room):
        raise ZeroDivisionError("in \x1b[2J trusted code")

    finding = Case(id="x-y", kind="k", act="a", expected="e", attack=attack).run(None)
    assert finding.succeeded
    assert "ZeroDivisionError" in finding.happened
    assert finding.evidence.isprintable()


def test_findings_are_reported_in_the_stable_form():
    held = Happened(what="refused", succeeded=False, evidence="code")
    case = Case(id="x-y", kind="k", act="a", expected="e", attack=lambda room: held)
    findings = [case.run(None)]
    document = findings_json(findings, 1.25)
    assert set(document) == {"cases", "seconds"}
    assert set(document["cases"][0]) == {"id", "kind", "expected", "happened", "succeeded"}
    assert "0 of 1 attacks" in summary_line(findings, 1.0)
    assert finding_line(findings[0]).startswith("held")


def test_a_canary_is_found_in_any_encoding(tmp_path):
    canary = Canary()
    word = canary.word
    import base64

    for text in (
        word,
        word[::-1],
        word.encode().hex(),
        base64.b64encode(b"x" + word.encode()).decode(),
    ):
        assert canary.is_in(f"say {text} aloud")
    assert not canary.is_in("nothing")
    with canary.planted(tmp_path) as files:
        assert all(word in file.read_text() for file in files)


def test_the_list_needs_no_room():
    result = CliRunner().invoke(command, ["--list", "--only", "network"])
    assert result.exit_code == 0
    assert "net-tcp" in result.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_attack_succeeds():
    findings = run_all()
    assert [finding.id for finding in findings] == [case.id for case in ALL]
    assert [f"{f.id}: {f.happened} ({f.evidence})" for f in findings if f.succeeded] == []
    print(summary_line(findings, sum(finding.seconds for finding in findings)))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command_prints_one_object_and_its_exit_code_tells():
    result = CliRunner().invoke(command, ["--json", "--only", "set-steps", "--only", "net-tcp"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert {case["id"] for case in document["cases"]} == {"set-steps", "net-tcp"}
