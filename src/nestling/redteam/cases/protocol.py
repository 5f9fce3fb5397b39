"""Lies on the pipe between environment and trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Final

from nestling.core.errors import JailError
from nestling.jobs.env_client import JailedEnv
from nestling.jobs.jail import JailLimits
from nestling.jobs.rollout_env import FinalRequest, ScoreRecord
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job, spy_files
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("pipe protocol")
CASES = _LIST.cases

_SEND: Final = """\
def send(text, length=None):
    body = text.encode() if isinstance(text, str) else text
    data = (len(body) if length is None else length).to_bytes(4, "big") + body
    while data:
        data = data[os.write(4, data):]
"""


def _score_one(env: JailedEnv) -> ScoreRecord:
    (start,) = env.reset([0])
    return env.score([FinalRequest(rollout_id=start.rollout_id, text="x", stop="done")])[0]


def _forged_score(room: TargetRoom, frame: str) -> Happened:
    """Send a frame in place of the score; the trainer must call it a fault."""
    files = spy_files(_SEND, on_score=f"send({frame})")
    try:
        with closing(room.open_env(files)) as env:
            env.rows(1)
            record = _score_one(env)
    except JailError as error:
        return Happened(what=f"fault {error.reason}", succeeded=False, evidence=error.detail)
    return Happened(what=f"taken as reward {record.reward}", succeeded=True)


for _id, _act, _frame in (
    ("pipe-nan", "a reward that is not a number",
     """'{"type":"score_reply","records":[{"reward":NaN,"rewards":{},"metrics":{},"error":null}]}'"""),
    ("pipe-out-of-range", "a reward of 1e300",
     """'{"type":"score_reply","records":[{"reward":1e300,"rewards":{},"metrics":{},"error":null}]}'"""),
    ("pipe-too-many-answers", "more scores than rollouts",
     """'{"type":"score_reply","records":[' + ','.join(['{"reward":1.0,"rewards":{},"metrics":{},"error":null}'] * 3) + ']}'"""),
    ("pipe-unknown-field", "a score with a field that asks for more",
     """'{"type":"score_reply","records":[],"final_hash":"0","post":1.0}'"""),
    ("pipe-other-type", "a reply of another kind", """'{"type":"loaded"}'"""),
    ("pipe-deep", "a hundred thousand nested lists", "'[' * 100_000"),
    ("pipe-wide-object", "a schema of a million members",
     """'{"type":"tools_reply","schemas":[{"a":[' + '0,' * 1_000_000 + '0]}]}'"""),
    ("pipe-announce-4gib", "announce four gibibytes", "'x', 2**32 - 1"),
    ("pipe-announce-nothing", "announce an empty frame", "'', 0"),
    ("pipe-half-a-frame", "send half a frame, then close",
     "'x', 100); os.close(4); os._exit(0"),
    ("pipe-garbage", "send random bytes", "bytes(range(256))"),
):  # fmt: skip

    def _attack(room: TargetRoom, frame: str = _frame) -> Happened:
        return _forged_score(room, frame)

    _LIST.add(
        _id,
        _attack,
        act=f"answer a scoring request with {_act}",
        expected="env.* fault, tree killed",
    )


def _probe_survives(room: TargetRoom, on_import: str) -> Happened:
    report = room.check(hostile_job(on_import=on_import), FAMILY)
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok,
        evidence="; ".join(report.lines()),
    )


_FORGE_TOOLS: Final = """\
os = getattr(random, "_" + "os")
body = {body!r}.encode()
def forge(host):
    os.write(4, len(body).to_bytes(4, "big") + body)
    os._exit(0)
host = os.sys.modules["nestling.jobs.verifiers_host"].VerifiersHost
getattr(type, "__setattr" + "__")(host, "tool_schemas", forge)
"""

for _id, _act, _body in (
    ("pipe-tools-not-functions", "tool schemas without functions",
     '{"type":"tools_reply","schemas":[{"function":"calc"}]}'),
    ("pipe-tools-odd-properties", "tool schemas whose arguments are a list",
     '{"type":"tools_reply","schemas":[{"function":{"name":"calc","parameters":{"properties":[1]}}}]}'),
):  # fmt: skip

    def _forge(room: TargetRoom, body: str = _body) -> Happened:
        return _probe_survives(room, _FORGE_TOOLS.format(body=body))

    _LIST.add(
        _id,
        _forge,
        act=f"forge {_act}, to crash the probe",
        expected="the frame is refused; a problem, not a crash",
    )


@_LIST.case(
    "pipe-rows-change",
    act="show the checks one prompt and the rollouts another",
    expected="a row that changed ends the environment",
)
def rows_change(room: TargetRoom) -> Happened:
    """Within one worker: the prompt is read again at every reset."""
    files = spy_files(
        """
        import nestling.jobs.verifiers_host as host
        seen = []
        def start(self, loaded, old=host.VerifiersHost._start):
            loaded.row = type(loaded.row)(index=loaded.row.index, system_prompt="",
                                          prompt="something else", data_json="{}")
            return old(self, loaded)
        host.VerifiersHost._start = start
        """
    )
    try:
        with closing(room.open_env(files)) as env:
            env.rows(1)
            env.reset([0])
    except JailError as error:
        return Happened(what=f"fault {error.reason}", succeeded=error.reason != "env.changed_row")
    return Happened(what="another prompt was taken", succeeded=True)


def _ends_in_time(
    room: TargetRoom, code: str, act: Callable[[JailedEnv], object], num_rows: int = 1
) -> Happened:
    clock = room.context.clock
    limits = JailLimits(cpu_s=20, load_s=20, call_s=2.0, life_s=6.0)
    began_s = clock.monotonic()
    try:
        with closing(room.open_env(spy_files(code, num_rows=num_rows), limits=limits)) as env:
            act(env)
        what, fault = "answered", False
    except JailError as error:
        what, fault = f"fault {error.reason}", True
    seconds = clock.monotonic() - began_s
    return Happened(what=f"{what} after {seconds:.1f} s", succeeded=not fault or seconds > 25)


@_LIST.case(
    "pipe-drip",
    act="answer every page with one row, each just within the limit of a call",
    expected="the whole life of an environment has a limit",
)
def drip(room: TargetRoom) -> Happened:
    """Four thousand pages of 1.5 seconds would be an hour and a half."""
    return _ends_in_time(
        room,
        """
        import nestling.jobs.env_worker as worker
        def rows(host, start, limit):
            time.sleep(1.0)
            frame = worker.wire.RowFrame(index=start, system_prompt="", prompt="p", data_json="{}")
            return worker.wire.RowsReply(rows=[frame], more=True)
        worker._rows = rows
        """,
        lambda env: env.rows(4096),
    )


@_LIST.case(
    "pipe-silence",
    act="never answer",
    expected="every call has a deadline",
)
def silence(room: TargetRoom) -> Happened:
    """Sleeping costs no processor time, so only the wall clock can end it."""
    return _ends_in_time(
        room,
        "import nestling.jobs.env_worker as worker\nworker._rows = lambda *a: time.sleep(600)",
        lambda env: env.rows(1),
    )
