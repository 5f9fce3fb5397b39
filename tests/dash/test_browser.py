"""The dashboard in a real browser."""

import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from nestling.core.rundir import RunDir
from nestling.report.gather import gather
from nestling.store import RunStore

_spec = importlib.util.spec_from_file_location(
    "dash_chromium", Path(__file__).parent / "chromium.py"
)
chromium = importlib.util.module_from_spec(_spec)
sys.modules["dash_chromium"] = chromium
_spec.loader.exec_module(chromium)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        chromium.find_chromium() is None, reason="no chromium; apt-get install chromium"
    ),
]

VIEWS = ("", "/steps", "/steps/1", "/episodes", "/fleet", "/held-out", "/alerts")
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def browser():
    found = chromium.Chromium()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_complaints(browser):
    """The page's console stays silent: no blocked script, no error, no dialog."""
    browser.said.clear()
    yield
    assert browser.said == []


@pytest.fixture(scope="module")
def serve():
    """Starts dashboards; gives their addresses."""
    with ExitStack() as servers:
        yield lambda folder: servers.enter_context(chromium.served(folder))


@pytest.fixture(scope="module")
def site(serve, runs):
    return serve(runs)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Where screenshots go: a folder to look at when NESTLING_SCREENSHOTS names one."""
    named = os.environ.get("NESTLING_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_view_fits_its_window(browser, site, runs, pictures, width, dark):
    browser.look(width=width, dark=dark)
    episode = gather(runs / "calm").train_episodes[0].id
    paths = ["/", *(f"/runs/calm{view}" for view in VIEWS), f"/runs/calm/episodes/{episode}"]
    for path in paths:
        browser.open(site + path, "document.querySelector('h1')")
        assert browser.js(NO_OVERFLOW), path
        ground, ink = browser.js(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (_light(ground) < 0.2) == dark
        assert abs(_light(ground) - _light(ink)) > 0.6
        name = path.strip("/").replace("/", "-") or "runs"
        shot = browser.picture(pictures / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert shot.stat().st_size > 5_000


def _light(color: str) -> float:
    red, green, blue = (int(part) for part in color.strip("rgb()").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_no_text_is_too_faint_to_read(browser, site, runs):
    """WCAG AA: 4.5 to 1 for every piece of text against the ground it stands on."""
    row = gather(runs / "calm").train_episodes[0]
    for dark in (False, True):
        browser.look(dark=dark)
        for view in (*VIEWS, f"/episodes/{row.id}"):
            browser.open(f"{site}/runs/calm{view}")
            assert browser.js(_CONTRAST) == [], (view, dark)


_CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const faint = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !one.getClientRects().length) continue;
    const style = getComputedStyle(one);
    const ink = one.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(ground(one))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.add(`${one.className || one.tagName} ${ratio.toFixed(2)}`);
  }
  return [...faint];
})()
"""


def test_hostile_text_is_text(browser, site, runs, hostile):
    for row in gather(runs / "group" / "hostile").episodes[:4]:
        browser.open(f"{site}/runs/group~hostile/episodes/{row.id}")
        assert "<script>alert('x')</script>" in browser.js("document.body.textContent")
        assert browser.js("document.querySelectorAll('script').length") == 1
        assert browser.js("[...document.images].every((one) => one.src.includes('/assets/'))")
    browser.open(f"{site}/runs/group~hostile/episodes?q=alert")
    assert browser.js("document.querySelectorAll('script').length") == 1


def test_the_policy_stops_a_script_that_got_in(browser, site):
    browser.open(f"{site}/runs/calm")
    browser.js(
        "document.body.insertAdjacentHTML('beforeend', "
        "'<button id=evil onclick=\"window.owned=1\">x</button>')"
    )
    browser.js("document.getElementById('evil').click()")
    browser.js(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned=1'}))"
    )
    assert browser.js("window.owned === undefined")
    assert any("Content Security Policy" in text for text in browser.said)
    browser.said.clear()


def test_filter_while_typing_and_by_choice(browser, site, runs):
    data = gather(runs / "calm")
    rows = "document.querySelectorAll('main tbody tr').length"
    browser.open(f"{site}/runs/calm/episodes")
    browser.js("document.getElementById('f-family').focus()")
    browser.js(
        "(() => { const s = document.getElementById('f-family'); s.value = 'triage';"
        " s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    triage = [one for one in data.episodes if one.family == "triage"]
    browser.wait(f"{rows} === {min(100, len(triage))}")
    assert browser.js("location.search") == "?family=triage"
    browser.js("document.activeElement.blur()")
    browser.press("/", "/")
    assert browser.js("document.activeElement.id") == "f-q"
    browser.write("template")
    found = [one for one in triage if "template" in one.id]
    browser.wait(f"{rows} === {len(found)} && document.activeElement.id === 'f-q'")
    assert browser.js("document.getElementById('f-q').value") == "template"
    browser.open(browser.js("location.href"))  # the address is enough to come back
    assert browser.js(rows) == len(found)


def test_pages_are_whole_without_scripts(browser, site, runs):
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(f"{site}/runs/calm/episodes?family=triage", "document.querySelector('h1')")
        assert browser.js("document.getElementById('live').textContent") == "not live"
        found = [one for one in gather(runs / "calm").episodes if one.family == "triage"]
        rows = browser.js("document.querySelectorAll('main tbody tr').length")
        assert rows == min(100, len(found))
        assert browser.js("document.querySelector('form.filters button[type=submit]').offsetHeight")
        browser.open(f"{site}/runs/calm", "document.querySelector('.chart path')")
        assert browser.js("document.querySelector('.readout').textContent").startswith("step 3:")
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


def test_everything_can_be_reached_with_the_keyboard(browser, site):
    browser.look()
    browser.open(f"{site}/runs/calm")
    wanted = browser.js(
        "document.querySelectorAll('a[href], button, summary, [tabindex=\"0\"]').length"
    )
    seen = []
    for _ in range(wanted):
        browser.press("Tab")
        seen.append(
            browser.js("document.activeElement.className + document.activeElement.textContent")
        )
        assert browser.js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert seen[0].endswith("Skip to the content")
    assert any("Held-out" in one for one in seen)
    browser.js("document.querySelector('.chart').focus()")
    browser.press("Home")
    assert browser.js("document.querySelector('.readout').textContent").startswith("step 1: agent")
    browser.press("ArrowRight")
    assert browser.js("document.querySelector('.readout').textContent").startswith("step 2: agent")


def test_theme_can_be_chosen_and_is_remembered(browser, site):
    browser.look(dark=False)
    browser.open(f"{site}/runs/calm")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.js(ground)
    for _ in range(2):
        browser.js("document.getElementById('theme').click()")
    dark = browser.js(ground)
    assert _light(dark) < 0.2 < _light(light)
    browser.open(f"{site}/runs/calm/fleet")
    assert browser.js(ground) == dark
    browser.js("localStorage.clear()")


def test_the_page_follows_the_run(browser, serve, make_run, tmp_path):
    folder = make_run(tmp_path / "run", steps=1, planned=2, measured=False)
    browser.open(
        f"{serve(tmp_path)}/runs/run/alerts",
        "document.querySelector('#live').dataset.state === 'on'",
    )
    browser.js("document.querySelector('main').dataset.mine = 'kept'")
    with RunStore(RunDir(folder).database) as store:
        store.set_meta("a.new.fact", "1")
        seq = store.events.last_seq()
    # Told by an event: the same document, with a row that was not there before.
    browser.wait("document.body.textContent.includes('a.new.fact')")
    assert browser.js("document.querySelector('main').dataset.mine") == "kept"
    assert browser.js("document.querySelector('footer').textContent").rstrip().endswith(str(seq))


def test_the_page_says_when_the_run_is_gone(browser, serve, make_run, tmp_path):
    folder = make_run(tmp_path / "run", steps=1, measured=False)
    browser.open(
        f"{serve(tmp_path)}/runs/run", "document.querySelector('#live').dataset.state === 'on'"
    )
    folder.rename(tmp_path / "away")
    browser.wait("document.querySelector('#live').textContent === 'run gone'")


def test_what_a_reader_opened_stays_open_when_the_page_changes(browser, serve, make_run, tmp_path):
    folder = make_run(tmp_path / "run", steps=2, planned=3, measured=False)
    browser.open(
        f"{serve(tmp_path)}/runs/run", "document.querySelector('#live').dataset.state === 'on'"
    )
    browser.js("document.querySelector('details[data-key=reward]').open = true")
    browser.js("document.querySelector('.chart').focus()")
    browser.press("Home")
    browser.js("window.scrollTo(0, 300)")
    make_run(folder, steps=3, planned=3, measured=False)
    browser.wait("document.querySelector('.page-head').textContent.includes('3 of 3')")
    assert browser.js("document.querySelector('details[data-key=reward]').open")
    assert not browser.js("document.querySelector('details[data-key=limits]').open")
    assert browser.js("document.querySelector('.readout').textContent").startswith("step 1: agent")
    assert browser.js("document.activeElement.className") == "chart"
    assert browser.js("Math.round(scrollY)") == 300
