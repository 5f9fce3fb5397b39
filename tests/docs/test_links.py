"""Every link of README, CONTRIBUTING and docs to a file of the repository leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.M | re.S)
    targets = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link}
    missing = [one for one in targets - {""} if not (page.parent / one).exists()]
    assert not missing


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    named = set(re.findall(r"^([a-z-]+)$", index, re.MULTILINE))
    assert {page.stem for page in PAGES[2:]} - {"index"} == named
