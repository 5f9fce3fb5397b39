"""Writing the verdict instead of earning it."""

from __future__ import annotations

import json
from typing import Final

from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, SMUGGLED, hostile_job, manifest
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("evaluator and records")
CASES = _LIST.cases

_FORGED: Final = json.dumps({"status": "succeeded", "post": 1.0, "uplift": 1.0, "reward": 1.0})
_NAMES: Final = ("reward.txt", "metrics.json", "scores.json", "outcome.json", "verdict.md")


@_LIST.case(
    "record-forged-files",
    act="submit score, verdict and metrics files with perfect results",
    expected="only job.toml, environment/ and data/ are a job, and nobody reads scores from them",
)
def forged_files(room: TargetRoom) -> Happened:
    """The same job with and without forged files must score the same."""
    plain = room.train(hostile_job())
    forged = room.train(
        hostile_job(files={f"data/{n.replace('.md', '.txt')}": _FORGED for n in _NAMES})
    )
    return Happened(
        what=f"post {plain.post} without, {forged.post} with forged files",
        succeeded=(forged.post or 0) > max(plain.post or 0, forged.pre or 0) + 0.25,
        evidence=f"{forged.status} {forged.reason}",
    )


@_LIST.case(
    "record-write-from-the-jail",
    act="write score files from the environment, everywhere it can",
    expected="the jail is read-only but for a private /tmp that nobody reads",
)
def write_from_the_jail(room: TargetRoom) -> Happened:
    """Every folder that exists in the jail, and the places outside by name."""
    targets = [str(room.folder / "work"), str(room.folder / "state"), str(room.folder)]
    left = room.in_jail(
        f"""
        for folder in [*{targets!r}, "/job", "/job/environment", "/nestling", "/", "/dev", "/proc",
                       "/usr/lib", *sys.path]:
            for name in {_NAMES!r}:
                try:
                    with open(os.path.join(folder, name), "w") as file: file.write("1.0")
                except OSError: continue
                say("DONE wrote", folder, name)
        attempt("outside", lambda: open({str(room.traps.file)!r}, "w").write("x"))
        """
    )
    found = [str(path) for name in _NAMES for path in room.folder.rglob(name)]
    return Happened(
        what="; ".join([*left.done(), *found]) or "no file was written",
        succeeded=bool(left.done() or found or room.traps.sprung()),
        evidence=left.said,
    )


@_LIST.case(
    "record-patch-everything",
    act="overwrite json, random, time, numpy, msgspec and verifiers from the environment",
    expected="no interpreter is shared: the next job of this room is scored as before",
)
def patch_everything(room: TargetRoom) -> Happened:
    """Bit for bit, before and after."""
    honest = hostile_job()
    before = room.train(honest)
    room.train(
        hostile_job(
            on_import="""
            import sys
            for name in ("json", "random", "time", "numpy", "msgspec", "verifiers.v1", "math",
                         "nestling.jobs.verifiers_host", "nestling.jobs.env_protocol"):
                module = sys.modules.get(name)
                for attribute in ("dumps", "loads", "fsum", "isfinite", "_finite", "_score",
                                  "decode_reply", "random", "monotonic", "perf_counter"):
                    if hasattr(module, attribute):
                        setattr(module, attribute, lambda *a, **k: 1.0)
            """
        )
    )
    after = room.train(honest)
    same = (before.post, before.final_hash, before.delta_norm) == (
        after.post,
        after.final_hash,
        after.delta_norm,
    )
    return Happened(
        what="the next job is the same bit for bit" if same else "the next job changed",
        succeeded=not same,
        evidence=f"{before.final_hash} and {after.final_hash}",
    )


@_LIST.case(
    "record-search-memory",
    act="search frames, garbage, environment, descriptors and /proc for secrets",
    expected="a process of its own with a scrubbed environment: nothing to find",
)
def search_memory(room: TargetRoom) -> Happened:
    """Everything an interpreter can see of itself and of others."""
    left = room.in_jail(
        """
        frame = sys._getframe()
        while frame is not None:
            say("frame", sorted(map(str, frame.f_locals))[:20]); frame = frame.f_back
        texts = [o for o in gc.get_objects() if isinstance(o, dict)]
        for d in texts:
            for k, v in list(d.items()):
                if isinstance(v, str) and ("canary" in v or "secret" in str(k).lower()):
                    say("memory", k, v[:100])
        say(dict(os.environ), sys.argv)
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                for name in ("environ", "cmdline", "maps", "status"):
                    try: say(pid, name, read(f"/proc/{pid}/{name}", 3000))
                    except OSError: pass
                if int(pid) != os.getpid():
                    attempt("mem of " + pid, read, f"/proc/{pid}/mem")
                    attempt("environ of " + pid, read, f"/proc/{pid}/environ")
        for fd in os.listdir("/proc/self/fd"):
            try: say("fd", fd, os.readlink("/proc/self/fd/" + fd))
            except OSError: pass
        """
    )
    found = room.canary.is_in(left.everything)
    return Happened(
        what="the canary came out"
        if found
        else "; ".join(left.done()) or "no canary in all that left",
        succeeded=found or bool(left.done()) or not left.said,
        evidence=f"{len(left.everything)} characters left the jail",
    )


@_LIST.case(
    "record-exit-zero-on-import",
    act="leave with exit code 0 while the package is imported",
    expected="a missing result is a failure, never a pass",
)
def exit_zero(room: TargetRoom) -> Happened:
    """In the probe and in training."""
    bundle = hostile_job(on_import=SMUGGLED + "os._exit(0)\n")
    report = room.check(bundle, FAMILY)
    outcome = room.train(bundle)
    return Happened(
        what=f"probe ok {report.ok}, training {outcome.status} {outcome.reason}",
        succeeded=report.ok or outcome.status == "succeeded",
        evidence="; ".join(report.lines()),
    )


@_LIST.case(
    "record-kill-everything",
    act="send SIGKILL to every process it can name: -1, 0, parents, 1 to 4000",
    expected="its own process namespace: only itself dies, the room lives on",
)
def kill_everything(room: TargetRoom) -> Happened:
    """The zygote must start the next job as if nothing had been."""
    pids = [room.traps.victim.pid]
    left = room.in_jail(
        f"""
        for pid in [*{pids!r}, os.getppid(), *range(2, 4000)]:
            if pid not in (0, os.getpid()):
                try: os.kill(pid, 9)
                except OSError: pass
        try: os.kill(1, 9)
        except OSError: pass
        os.kill(-1, 9)
        """
    )
    again = room.in_jail("say('alive')")
    dead = room.traps.sprung()
    return Happened(
        what="; ".join(dead) or f"ended by {left.reason or 'nothing'}; the next jail answers",
        succeeded=bool(dead) or "alive" not in again.said,
        evidence=left.detail,
    )


@_LIST.case(
    "record-other-manifest",
    act="change job.toml in the jail between loading and training",
    expected="what was frozen is what is trained: the files are read-only copies",
)
def other_manifest(room: TargetRoom) -> Happened:
    """The trainer read the manifest before anything ran."""
    bundle = hostile_job(
        on_import=SMUGGLED
        + """
try:
    with open("/job/job.toml", "w") as file: file.write("base_model = 'micro'")
except OSError: pass
""",
        toml=manifest("nano"),
    )
    outcome = room.train(bundle)
    return Happened(
        what=f"trained {outcome.base_model} for {outcome.train_steps} step",
        succeeded=outcome.base_model != "nano" or outcome.train_steps > 1,
        evidence=outcome.job_hash,
    )
