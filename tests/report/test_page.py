import csv
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from nestling.core.errors import StoreError
from nestling.core.rundir import RunDir
from nestling.report.page import write_report
from nestling.report.shown import duration, number, usd, visible
from nestling.report.table import Table
from nestling.store import RunStore

pytestmark = pytest.mark.long

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Nesting, ids, links and everything that would load something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name == "href":
                self.links.append(value)
            elif name in ("src", "srcset", "data", "action", "poster"):
                self.loads.append(value)
            elif name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def check(page: Page, source: str) -> None:
    """Well formed, on its own, every link inside it leads somewhere."""
    assert "script" not in page.tags
    assert page.loads == page.handlers == []
    assert "link" not in page.tags
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not re.search(r"url\((?!#)", source)
    assert "@import" not in source


@pytest.fixture(scope="module")
def hostile_page(make_run, tmp_path_factory, hostile):
    folder = make_run(tmp_path_factory.mktemp("hostile") / "<img src=x>run", steps=2, text=hostile)
    return write_report(folder)


def test_page_stands_alone_and_escapes_what_the_agent_wrote(hostile_page):
    source = hostile_page.read_text(encoding="utf-8")
    page = Page(source)
    check(page, source)
    assert "img" not in page.tags
    assert "<script" not in source.lower()
    # It is there, as text: in the transcript, the files and the probe messages.
    assert page.text.count("<script>alert('x')</script>") > 10
    assert "{{ 7 * 7 }}" in page.text
    assert "<img src=x>run" in page.text
    assert "\u202e" not in source
    assert "\x00" not in source
    assert "\\u202e\\x00" in page.text


def test_page_has_every_part(hostile_page):
    text = Page(hostile_page.read_text(encoding="utf-8")).text
    for words in (
        "Finished: 2 of 2 outer steps.",
        "0.1.0 0123456789ab",
        "2 cores, 8 GB",
        "outer.seed = 7",
        "No-op line",
        "Held out (triage), step 2 minus untrained",
        "0.35 × validation + 0.6 × quality + 0.05 × speed",
        "unknown key",
        "training step of the small model",
        "One run is one training seed.",
        "the same tasks and seeds",
        "inner.seed",
    ):
        assert words in text, words


def test_files_beside_the_page(hostile_page):
    folder = hostile_page.parent
    names = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert names == {path.stem for path in (folder / "figures").glob("*.csv")}
    assert names >= {"reward", "terms", "validity", "scores", "uplift", "base_models", "held_out"}
    for path in (folder / "figures").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert text.count("http") == 1  # its own namespace
        assert "<text" in text
        assert "<image" not in text
    rows = list(csv.DictReader((folder / "figures" / "reward.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[0]["reward_noop_mean"]) == pytest.approx(0.44875)
    episodes = list(csv.DictReader((folder / "episodes.csv").read_text().splitlines()))
    assert len([row for row in episodes if row["purpose"] == "train"]) == 32
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == [
        *("final_reward", "noop_reward", "best_reward", "untrained_reward", "heldout_gain"),
        *("heldout_p", "heldout_n", "steps", "jobs", "usd", "gpu_minutes", "commit"),
    ]


def test_same_run_gives_the_same_page(hostile_page, tmp_path):
    run = hostile_page.parent.parent
    again = write_report(run, tmp_path / "elsewhere" / "page.html")
    assert again == tmp_path / "elsewhere" / "page.html"
    assert again.read_bytes() == hostile_page.read_bytes()


def test_unfinished_run_says_so(make_run, tmp_path):
    folder = make_run(tmp_path / "cut", steps=1, planned=5, measured=False)
    source = write_report(folder).read_text(encoding="utf-8")
    page = Page(source)
    check(page, source)
    assert "Unfinished: 1 of 5 outer steps done" in page.text
    assert "No held-out gain was measured" in page.text
    assert "No sweep with a held-out family is recorded" in page.text


def test_empty_run_says_so(tmp_path):
    folder = RunDir.create(tmp_path / "empty")
    with RunStore(folder.database):
        pass
    page_path = write_report(folder.root)
    assert page_path == folder.root / "report" / "index.html"
    source = page_path.read_text(encoding="utf-8")
    page = Page(source)
    check(page, source)
    assert "has not finished an episode yet" in page.text
    assert "svg" not in page.tags


def test_page_that_cannot_be_written_is_a_store_error(hostile_page, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        write_report(hostile_page.parent.parent, blocked / "index.html")


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("in\u200bvisible \u2066", "in\\u200bvisible \\u2066"),
        ("lone \ud800", "lone \\ud800"),
        ("Zürich 東京 é", "Zürich 東京 é"),
    ],
)
def test_hidden_characters_are_shown(raw, seen):
    assert visible(raw) == seen


def test_long_text_is_cut():
    assert visible("x" * 30_000).endswith("… 10000 more characters")


def test_numbers_for_people():
    assert (number(None), number(-0.0001), number(0.12345)) == ("–", "0.000", "0.123")
    assert (duration(3.21), duration(61), duration(7300)) == ("3.2 s", "1 min 1 s", "2 h 1 min")
    assert (usd(None), usd(0.0), usd(0.0123), usd(12.5)) == ("–", "$0.00", "$0.0123", "$12.50")


def test_text_in_csv_is_never_a_formula():
    table = Table(columns=("a", "b"), rows=[("=1+1", -2.5), ("@x", None), ("ok", True)])
    assert table.csv() == "a,b\n'=1+1,-2.5\n'@x,\nok,yes\n"
