import json
import signal
import subprocess
import sys

import httpx
import pytest

from nestling.core.errors import ConfigError
from nestling.dash.server import DashConfig, listening
from nestling.store import RunStore

pytestmark = pytest.mark.long

ANY_PORT = DashConfig(port=0)


async def _next_event(lines):
    """Name and data of the next server-sent event."""
    found = {}
    async for line in lines:
        if not line and found:
            return found
        name, _, value = line.partition(": ")
        if name in ("event", "data"):
            found[name] = value
    return found


@pytest.fixture
def fresh(make_run, tmp_path):
    """A run that the test may write."""
    return make_run(tmp_path / "run", steps=1, measured=False)


async def test_a_change_of_the_run_is_told(fresh, tmp_path):
    async with (
        listening(tmp_path, ANY_PORT) as server,
        httpx.AsyncClient(timeout=60) as web,
        web.stream("GET", f"{server.address}runs/run/events") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        first = await _next_event(lines)
        assert first["event"] == "change"
        with RunStore(fresh / "run.db") as store:
            store.set_meta("note", "something happened")
            expected = store.events.last_seq()
        second = await _next_event(lines)
        assert second == {"event": "change", "data": str(expected)}
        assert int(first["data"]) < expected


async def test_a_run_that_goes_away_is_told(fresh, tmp_path):
    async with (
        listening(tmp_path, ANY_PORT) as server,
        httpx.AsyncClient(timeout=60) as web,
        web.stream("GET", f"{server.address}runs/run/events") as stream,
    ):
        lines = stream.aiter_lines()
        assert (await _next_event(lines))["event"] == "change"
        fresh.rename(tmp_path / "elsewhere")
        lost = await _next_event(lines)
        assert lost["event"] == "lost"
        assert "no run store" in json.loads(lost["data"])


async def test_an_open_stream_does_not_keep_the_server(runs):
    async with listening(runs, ANY_PORT) as server:
        web = httpx.AsyncClient(timeout=60)
        stream = await web.send(
            web.build_request("GET", f"{server.address}runs/calm/events"), stream=True
        )
    assert server.task.done()
    await stream.aclose()
    await web.aclose()


async def test_outside_loopback_there_is_always_a_token(runs):
    async with listening(runs, DashConfig(host="0.0.0.0", port=0)) as server:
        address, _, token = server.address.partition("?token=")
        assert len(token) >= 24
        address = address.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient() as web:
            assert (await web.get(address)).status_code == 401
            assert (await web.get(f"{address}?token={token}")).status_code == 303
            assert (await web.get(address)).status_code == 200
    async with listening(runs, ANY_PORT) as server:
        assert "token" not in server.address


async def test_mistakes_are_said(runs, tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        async with listening(tmp_path, ANY_PORT):
            pass
    with pytest.raises(ConfigError, match="is not a folder"):
        async with listening(tmp_path / "none", ANY_PORT):
            pass
    async with listening(runs, ANY_PORT) as server:
        port = int(server.address.rstrip("/").rpartition(":")[2])
        with pytest.raises(ConfigError, match="choose another with --port"):
            async with listening(runs, DashConfig(port=port)):
                pass


def test_command_serves_until_it_is_interrupted(runs):
    command = [sys.executable, "-m", "nestling", "dash", str(runs), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        address = run.stdout.readline().strip()
        with httpx.Client(timeout=60) as web:
            assert "hostile" in web.get(address).text
            with web.stream("GET", f"{address}runs/calm/events") as stream:
                assert next(stream.iter_lines()) == "event: change"
                run.send_signal(signal.SIGINT)
                assert run.wait(60) == 130
        errors = run.stderr.read()
    assert "Traceback" not in errors
    assert "interrupted" in errors
