import csv
import io
import re
from html.parser import HTMLParser

import httpx
import pytest

from nestling.core.clock import SystemClock
from nestling.dash.app import COOKIE, DashApp
from nestling.dash.live_run import LiveRun
from nestling.report.gather import gather

pytestmark = pytest.mark.long

VIEWS = ("", "/steps", "/steps/1", "/episodes", "/fleet", "/held-out", "/alerts")
LOCAL = ["127.0.0.1"]


def client(runs, *, token=None, hosts=LOCAL, name="127.0.0.1"):
    app = DashApp(runs, SystemClock(), token=token, hosts=list(hosts))
    transport = httpx.ASGITransport(app=app.asgi)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{name}:8765")


class Markup(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


async def test_every_view_of_a_run_is_there(runs):
    pages = {}
    async with client(runs) as web:
        for view in VIEWS:
            answer = await web.get(f"/runs/calm{view}")
            assert answer.status_code == 200, view
            pages[view] = answer.text
    words = {view: " ".join(" ".join(Markup(text).words).split()) for view, text in pages.items()}
    assert "Finished: 3 of 3 outer steps." in words[""]
    for name in ("Reward now", "Held-out gain", "Time left", "no-op"):
        assert name in words[""]
    assert pages[""].count('class="chart"') == 7
    assert "train/000000" in words["/steps/1"]
    assert "advantage" in words["/steps/1"]
    num = len(gather(runs / "calm").episodes)
    assert f"{num} of {num}, mean reward" in words["/episodes"]
    assert "cpu-core" in words["/fleet"]
    assert "Never trained on: triage" in words["/held-out"]
    assert "Jobs wait and there is no worker" in words["/alerts"]


async def test_episode_page_has_what_was_said_done_and_earned(runs):
    data = gather(runs / "calm")
    one = next(row for row in data.train_episodes if row.is_job_done and row.valid_attempt == 1)
    async with client(runs) as web:
        page = await web.get(f"/runs/calm/episodes/{one.id}")
    text = " ".join(" ".join(Markup(page.text).words).split())
    assert page.status_code == 200
    assert f"{one.reward:.3f}" in text
    assert "reward = 0.35 ×" in text
    assert "Inner training curve" in text
    assert f"base_model = {chr(34)}{one.base_model}" in text  # the diff against the starting files
    assert "I write the job." in text
    assert "Its group" in text
    assert f"Accepted at submission {one.valid_attempt}." in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/none", 404),
        ("/runs/..%2f..%2fetc", 404),
        ("/runs/calm/steps/99", 404),
        ("/runs/calm/episodes/none", 404),
        ("/runs/calm/run.db", 404),
        ("/assets/..%2fapp.py", 404),
        ("/assets/dash.css", 200),
        ("/", 200),
    ],
)
async def test_only_what_is_meant_to_be_seen(runs, path, status):
    async with client(runs) as web:
        assert (await web.get(path)).status_code == status
        assert (await web.post(path)).status_code in (404, 405)


async def test_agent_text_stays_text_and_nothing_foreign_may_run(runs, hostile):
    data = gather(runs / "group" / "hostile")
    ids = [one.id for one in data.episodes]
    told = 0
    async with client(runs) as web:
        for path in [*VIEWS[:1], "/steps/1", "/episodes", *(f"/episodes/{one}" for one in ids)]:
            page = await web.get(f"/runs/group~hostile{path}")
            assert page.status_code == 200
            found = Markup(page.text)
            assert found.tags.count("script") == 1
            assert "style" not in found.tags
            names = {name for name, _ in found.attributes}
            assert not [name for name in names if name.startswith("on") or name == "style"]
            told += "".join(found.words).count("<script>alert('x')</script>")
            assert "\u202e" not in page.text
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
    assert told > len(ids)
    assert "{{ 7 * 7 }}" in page.text


async def test_an_evaluation_shows_who_was_better(evaluation):
    async with client(evaluation) as web:
        pages = [
            (await web.get(f"/runs/compared{view}")).text
            for view in ("", "/held-out", "/steps", "/episodes", "/alerts")
        ]
    texts = [" ".join(" ".join(Markup(page).words).split()) for page in pages]
    assert "holds an evaluation" in texts[0]
    assert "Minus noop" in texts[1]
    assert "Families: ledger" in texts[1]
    assert "template" in texts[1]
    assert "12 of 12, mean reward" in texts[3]
    assert "Nothing to look at." in texts[4]


async def test_episode_list_filters_sorts_and_pages(runs):
    data = gather(runs / "calm")
    async with client(runs) as web:

        async def ids(query):
            page = await web.get(f"/runs/calm/episodes?{query}")
            return re.findall(r'<tr><th><a href="/runs/calm/episodes/([^"]+)"', page.text)

        expected = [one.id for one in data.episodes if one.family == "dispatch" and one.step == 2]
        assert sorted(await ids("family=dispatch&step=2")) == sorted(expected)
        best = sorted(data.episodes, key=lambda one: -one.reward)[0].reward
        rewards = {one.id: one.reward for one in data.episodes}
        falling = [rewards[one] for one in await ids("sort=reward")]
        assert falling[0] == best
        assert falling == sorted(falling, reverse=True)
        rising = [rewards[one] for one in await ids("sort=reward&rising=1")]
        assert rising == sorted(rising)
        first, second = await ids("sort=played"), await ids("sort=played&page=2")
        assert len(first) == 100
        assert not set(first) & set(second)
        assert await ids("q=no-such-thing") == []
        assert await ids("sort=nonsense&page=-3&step=x") == []


async def test_tables_are_the_report_s(runs):
    async with client(runs) as web:
        text = (await web.get("/runs/calm/episodes.csv")).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["episode"] for row in rows] == [one.id for one in gather(runs / "calm").episodes]


async def test_token_is_asked_of_everything(runs):
    async with client(runs, token="s3cret", hosts=["*"], name="example.test") as web:
        for path in ("/", "/runs/calm", "/runs/calm/events", "/assets/dash.js"):
            refused = await web.get(path)
            assert refused.status_code == 401
            assert "calm" not in refused.text
        assert (await web.get("/?token=wrong")).status_code == 401
        welcome = await web.get("/?token=s3cret")
        assert welcome.status_code == 303
        assert welcome.headers["location"] == "/"
        cookie = welcome.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert web.cookies[COOKIE] == "s3cret"
        assert (await web.get("/")).status_code == 200
        web.cookies.clear()
        bearer = {"authorization": "Bearer s3cret"}
        assert (await web.get("/", headers=bearer)).status_code == 200


async def test_other_names_for_this_machine_are_refused(runs):
    async with client(runs, name="rebound.example") as web:
        assert (await web.get("/")).status_code == 400


async def test_damaged_run_is_named_and_the_others_stay(runs, tmp_path):
    (tmp_path / "calm").symlink_to(runs / "calm")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"no database at all" * 100)
    async with client(tmp_path) as web:
        page = await web.get("/")
        assert page.status_code == 200
        assert "is damaged" in page.text
        assert 'href="/runs/calm"' in page.text
        broken = await web.get("/runs/broken")
        assert broken.status_code == 503
        assert "is damaged" in broken.text


def test_second_look_reads_only_news_and_sees_the_same(make_run, tmp_path):
    folder = make_run(tmp_path / "run", steps=1, planned=3, measured=False)
    live = LiveRun("run", folder, SystemClock())
    first = live.view()
    assert live.view() is first
    make_run(folder, steps=2, planned=3, measured=True)
    second = live.view()
    assert second.seq > first.seq
    assert second.data == gather(folder)
    assert len(second.data.steps) == 2
    assert len(second.data.jobs) > len(first.data.jobs)
