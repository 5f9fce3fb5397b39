"""Cheap handlers for real worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nestling.core.errors import JobFailedError


def echo(payload, context):
    print("noise on stdout must not reach the pipe")
    return {"echo": payload, "pid": os.getpid()}


def nap(payload, context):
    time.sleep(0.15)
    return payload["n"] ** 2


def sleep(payload, context):
    context.progress({"started": True})
    Path(payload["started"]).write_text(str(os.getpid()))
    time.sleep(payload["seconds"])
    return "slept"


def die_once(payload, context):
    mark = Path(payload["mark"])
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return {"pid": os.getpid(), "first": int(mark.read_text())}


def die(payload, context):
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(payload, context):
    os.kill(os.getpid(), signal.SIGSTOP)


def reject(payload, context):
    raise JobFailedError("train.diverged", "the loss is not finite")


def crash(payload, context):
    raise KeyError("a bug")


def stages(payload, context):
    context.stage("load", 60.0)
    context.stage("train", 0.3)
    time.sleep(60)


def leave_children(payload, context):
    """One child in a session of its own, whose parent is gone, and one that ignores SIGTERM."""
    script = "import time; time.sleep(300)"
    shell = f'setsid {sys.executable} -c "{script}" >/dev/null 2>&1 & echo $!'
    away = subprocess.run(
        ["sh", "-c", shell], stdout=subprocess.PIPE, text=True, check=True, timeout=20
    )
    near = subprocess.Popen(
        [sys.executable, "-c", "import signal;" + "signal.signal(15, signal.SIG_IGN);" + script]
    )
    Path(payload["started"]).write_text(f"{os.getpid()} {near.pid} {int(away.stdout)}")
    time.sleep(payload["seconds"])
    return "left"


def environment(payload, context):
    return dict(os.environ)


def hardware(payload, context):
    time.sleep(0.1)  # so that the other worker gets the next one
    shown = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    return {**shown, "cores": sorted(os.sched_getaffinity(0))}


def take_memory(payload, context):
    held = bytearray(payload["mib"] * 2**20)
    if payload["mib"] > 100:
        time.sleep(60)
    return len(held)


def child_takes_memory(payload, context):
    script = f"hold = bytearray({payload['mib']} * 2**20); import time; time.sleep(60)"
    subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)


def make_handlers(settings):
    if settings.get("broken_start"):
        print("the accelerator is on fire", file=sys.stderr)
        raise SystemExit(3)
    handlers = [echo, nap, sleep, die_once, die, freeze, reject, crash, stages, leave_children]
    handlers += [environment, hardware, take_memory, child_takes_memory]
    return {handler.__name__: handler for handler in handlers}
