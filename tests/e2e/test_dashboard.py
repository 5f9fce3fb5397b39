"""A real run, watched in a real browser while it is played."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

_path = Path(__file__).parent.parent / "dash" / "chromium.py"
_spec = importlib.util.spec_from_file_location("e2e_chromium", _path)
chromium = importlib.util.module_from_spec(_spec)
sys.modules["e2e_chromium"] = chromium
_spec.loader.exec_module(chromium)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        chromium.find_chromium() is None, reason="no chromium; apt-get install chromium"
    ),
]

MOST_S = 300.0


def _until(condition, process) -> None:
    end = time.monotonic() + MOST_S
    while not condition():
        assert process.poll() in (None, 0)
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_run_is_followed_from_its_first_event_to_its_rollouts(nested_run, tmp_path: Path):
    folder = tmp_path / "runs" / "watched"
    pictures = Path(os.environ.get("NESTLING_SCREENSHOTS", str(tmp_path / "pictures")))
    pictures.mkdir(parents=True, exist_ok=True)
    process = nested_run(folder, "name=watched", "outer.group_size=2")
    _until((folder / "run.db").exists, process)
    browser = chromium.Chromium()
    try:
        with chromium.served(tmp_path / "runs") as site:
            browser.look()
            live = "document.querySelector('#live')?.dataset.state === 'on'"
            browser.open(f"{site}/runs/watched", live)
            browser.js("document.documentElement.dataset.mine = 'never loaded again'")
            # The tiles fill by themselves once the step is done.
            ended = "document.querySelector('.tiles').textContent.includes('took')"
            _until(lambda: browser.js(ended), process)
            assert browser.js("document.documentElement.dataset.mine") == "never loaded again"
            browser.picture(pictures / "watched-overview.png")
            out, err = process.communicate(timeout=MOST_S)
            assert json.loads(out.splitlines()[-1])["steps"] == 1, err

            links = "[...document.querySelectorAll('main tbody th a')].map((one) => one.href)"
            browser.open(f"{site}/runs/watched/episodes")
            episodes = browser.js(links)
            assert len(episodes) == 2
            told = ""
            for number, address in enumerate(episodes):
                browser.open(address)
                text = browser.js("document.querySelector('main').textContent")
                assert "Reward, written out" in text
                assert "You write training jobs" in text  # the prompt of the transcript
                told += text
                browser.picture(pictures / f"watched-episode-{number}.png")
            assert ("Inner training curve" in told) == ("best untrained" in told)
            for view in ("steps", "steps/1", "fleet", "held-out", "alerts"):
                browser.open(f"{site}/runs/watched/{view}")
                browser.picture(pictures / f"watched-{view.replace('/', '-')}.png")
            assert browser.said == []
    finally:
        browser.close()
