"""Bombs. Each is bounded by the limits of its jail, which a gentle look has confirmed first."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Final

from nestling.core.errors import JailError
from nestling.jobs.jail import JailLimits
from nestling.jobs.rollout_env import FinalRequest
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job, reward, spy_files
from nestling.redteam.room import TargetRoom

__all__ = ["BOMB_LIMITS", "CASES"]

_LIST = CaseList("resources")
CASES = _LIST.cases

BOMB_LIMITS: Final = JailLimits(
    cpu_s=4,
    memory_bytes=768 * 1024 * 1024,
    processes=8,
    tmp_bytes=32 * 1024 * 1024,
    log_bytes=1024 * 1024,
    load_s=20.0,
    call_s=3.0,
    life_s=20.0,
)
_MAX_WALL_S: Final = 30.0
_MAX_TREE: Final = 10
"""Processes of one jail: eight of the job, bubblewrap's and the one that keeps the namespaces."""


def _namespace(pid: int | str) -> int | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    return None


def _members(namespace: int) -> list[int]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _namespace(pid) == namespace]


def _bomb(room: TargetRoom, code: str, *, must_end: bool | None) -> Happened:
    """Run it where the trainer would; afterwards nothing of it may be left, anywhere.

    `must_end`: whether the jail has to end the job, must not have to, or either (None).
    """
    clock = room.context.clock
    free_before = shutil.disk_usage(room.folder).free
    began_s = clock.monotonic()
    most, namespace, said = 0, None, ""
    try:
        with closing(room.open_env(spy_files(_GENTLE, on_score=code), limits=BOMB_LIMITS)) as env:
            said = env.rows(1)[0].prompt
            if "WITHIN LIMITS" not in said:
                return Happened(what="limits are off; not fired", succeeded=True, evidence=said)
            process = env._process
            namespace = _namespace(process.init_pid or 0) if process else None
            (start,) = env.reset([0])
            record = env.score([FinalRequest(rollout_id=start.rollout_id, text="x", stop="done")])[
                0
            ]
            most = len(_members(namespace)) if namespace else 0
            what, ended = f"contained: {record.error or record.rewards}", False
    except JailError as error:
        what, ended = f"ended by {error.reason}", True
        said = error.detail
    seconds = clock.monotonic() - began_s
    left = _members(namespace) if namespace else []
    lost = free_before - shutil.disk_usage(room.folder).free
    bad = []
    if left:
        bad.append(f"{len(left)} processes outlived it")
    if most > _MAX_TREE:
        bad.append(f"{most} processes at once")
    if seconds > _MAX_WALL_S:
        bad.append(f"it took {seconds:.0f} s")
    if lost > 256 * 1024 * 1024:
        bad.append(f"{lost} bytes of disk are gone")
    if must_end is not None and must_end != ended:
        bad.append("it was ended" if ended else "it was not ended")
    again = room.in_jail("say('alive')").said
    if "alive" not in again:
        bad.append("the next jail does not start")
    return Happened(what="; ".join(bad) or what, succeeded=bool(bad), evidence=said)


_GENTLE: Final = f"""
limits = {{n: resource.getrlimit(getattr(resource, n)) for n in
          ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE")}}
within = (limits["RLIMIT_CPU"][1] <= {BOMB_LIMITS.cpu_s}
          and limits["RLIMIT_AS"][1] <= {BOMB_LIMITS.memory_bytes}
          and limits["RLIMIT_NPROC"][1] <= {BOMB_LIMITS.processes}
          and limits["RLIMIT_FSIZE"][1] <= {BOMB_LIMITS.file_bytes})
tmp = os.statvfs("/tmp")
within = within and tmp.f_blocks * tmp.f_bsize <= {BOMB_LIMITS.tmp_bytes} and tmp.f_files <= 4096
say("WITHIN LIMITS" if within else "limits", limits, tmp)
"""

for _id, _act, _code, _must_end in (
    ("bomb-fork", "fork without end",
     "while True:\n    try: os.fork()\n    except OSError: break\nelse: pass", None),
    ("bomb-threads", "start threads without end",
     "try:\n    for _ in range(1000): threading.Thread(target=time.sleep, args=(60,)).start()\n"
     "except RuntimeError as e: return 0.5", None),
    ("bomb-memory", "ask for a hundred gigabytes, then take what is given",
     "try: bytearray(100 << 30)\nexcept MemoryError: pass\nkept = []\n"
     "try:\n    while True: kept.append(bytearray(8 << 20))\nexcept MemoryError: pass", None),
    ("bomb-memory-forked", "take all memory in every process it may have",
     "for _ in range(3):\n    if os.fork() == 0:\n        kept = []\n        try:\n"
     "            for _ in range(64): kept.append(bytearray(1 << 20))\n"
     "        except MemoryError: pass\n        time.sleep(60)", None),
    ("bomb-detached-memory", "fill shared segments and memory files, which no process limit counts",
     "libc = ctypes.CDLL(None)\nfds = []\n"
     "try:\n    fds.append(os.memfd_create('x')); os._exit(0)\n"
     "except OSError: pass\n"
     "if libc.shmget(0, 1 << 20, 0o1600) >= 0: os._exit(0)\n", False),
    ("bomb-disk", "fill the disk",
     "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
     "for n in range(64):\n    try:\n        with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(8 << 20))\n"
     "    except OSError as e: last = str(e)\n", None),
    ("bomb-empty-files", "make empty files without end: they cost kernel memory, not disk",
     "for n in range(100_000):\n    try: open(f'/tmp/{n}', 'w').close()\n"
     "    except OSError: break\nelse: os._exit(0)\n", False),
    ("bomb-output", "write to standard output without end",
     "while True: os.write(1, b'x' * 65536)", True),
    ("bomb-endless-loop", "compute without end", "while True: pass", True),
    ("bomb-endless-regex", "match a regular expression that backtracks without end",
     "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", True),
    ("bomb-descriptors", "open files without end",
     "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\nexcept OSError: pass", None),
    ("bomb-deep-recursion", "overflow the C stack",
     "sys.setrecursionlimit(1 << 30)\ndef down(n): return down(n + 1)\ndown(0)", True),
    ("bomb-daemon", "leave daemons that ignore signals and outlive their parent",
     "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
     "            for s in range(1, 32):\n                try: signal.signal(s, signal.SIG_IGN)\n"
     "                except (OSError, ValueError): pass\n            time.sleep(600)\n        os._exit(0)",
     None),
    ("bomb-zombies", "leave children unreaped",
     "for _ in range(6):\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: break",
     None),
    ("bomb-signals", "flood itself with timers and signals",
     "signal.signal(signal.SIGALRM, lambda *a: None)\n"
     "signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\nwhile True: pass", True),
):  # fmt: skip

    def _attack(room: TargetRoom, code: str = _code, must_end: bool | None = _must_end) -> Happened:
        return _bomb(room, code, must_end=must_end)

    _LIST.add(
        _id,
        _attack,
        act=_act,
        expected="limits of the jail; the whole tree is gone and the next job starts",
    )


def _probed(room: TargetRoom, rows: str) -> Happened:
    """In the probe: a problem of the job, in bounded time and memory of ours."""
    clock = room.context.clock
    gc.collect()
    began_s, before = clock.monotonic(), _resident_bytes()
    report = room.check(hostile_job(rows=rows), FAMILY)
    seconds, grown = clock.monotonic() - began_s, _resident_bytes() - before
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok or seconds > 90 or grown > 1 << 30,
        evidence=f"{seconds:.1f} s, {grown >> 20} MiB more; {'; '.join(report.lines())}",
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


for _pid, _pact, _rows in (
    ("bomb-endless-rows", "yield rows without end",
     "while True:\n    yield Task(sample(rng, 2, 3), self.config.task)"),
    ("bomb-huge-rows", "yield rows of a megabyte",
     "for _ in range(64):\n    row = sample(rng, 2, 3)\n"
     "    yield Task(row.model_copy(update={'prompt': row.prompt + 'x' * 1_000_000}), self.config.task)"),
    ("bomb-many-large-rows", "yield rows that are each just within their limit",
     "for _ in range(4000):\n    row = sample(rng, 2, 3)\n"
     "    yield Task(row.model_copy(update={'name': 'x ' * 15_000}), self.config.task)"),
):  # fmt: skip

    def _rows_bomb(room: TargetRoom, rows: str = _rows) -> Happened:
        return _probed(room, rows)

    _LIST.add(_pid, _rows_bomb, act=_pact, expected="caps on rows, on each and on all together")


@_LIST.case(
    "bomb-slow-scan",
    act="a data file of escaped quotes that makes the leak scan backtrack for hours",
    expected="files are read in linear time",
)
def slow_scan(room: TargetRoom) -> Happened:
    """Quadratic in a line of 250 KB before it was mended."""
    clock = room.context.clock
    line = '"' + '\\"' * 120_000
    files = {f"data/{n}.txt": line for n in range(4)}
    began_s = clock.monotonic()
    report = room.check(hostile_job(files=files), FAMILY)
    seconds = clock.monotonic() - began_s
    return Happened(
        what=f"scanned in {seconds:.1f} s, ok {report.ok}",
        succeeded=seconds > 60,
        evidence=f"{sum(map(len, files.values()))} characters",
    )


@_LIST.case(
    "bomb-tool-answers",
    act="answer every tool call with a megabyte",
    expected="a tool answer has a cap; the trainer never sees more",
)
def tool_answers(room: TargetRoom) -> Happened:
    """In training, where the answers become tokens."""
    bundle = hostile_job(
        on_import="""
        class Loud(Tools):
            @vf.tool
            def calc(self, expression: str) -> str:
                "Compute."
                return "9" * 1_000_000
        Tools = Loud
        """,
        rewards=reward("return float(len(trace.last_reply) % 7)"),
    )
    before = _resident_bytes()
    outcome = room.train(bundle)
    grown = _resident_bytes() - before
    return Happened(
        what=f"{outcome.status} {outcome.reason}; {grown >> 20} MiB more",
        succeeded=grown > 1 << 30 or room.paid(outcome).total > 0.35 + 1e-9,
        evidence=outcome.detail,
    )
