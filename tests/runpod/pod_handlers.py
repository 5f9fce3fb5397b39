"""Cheap handlers for real worker processes in simulated pods."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from nestling.core.errors import JobFailedError
from nestling.core.rundir import ArtifactStore


def environment(payload, context):
    return dict(os.environ)


def die(payload, context):
    os._exit(9)


def reject(payload, context):
    raise JobFailedError("train.diverged", "the loss is not finite")


def break_down(settings):
    print("the accelerator is on fire", file=sys.stderr)
    raise SystemExit(3)


def make_handlers(settings):
    run, state = Path(settings["run"]), Path(settings["state"])
    artifacts = ArtifactStore(run / "artifacts")

    def echo(payload, context):
        context.stage("echo", 60.0)
        return {"echo": payload["n"], "pod": os.environ.get("RUNPOD_POD_ID"), "pid": os.getpid()}

    def fetch(payload, context):
        """Uses its bundle, leaves things about, and tells what an earlier job left."""
        found = sorted(path.name for path in run.rglob("*") if path.is_file())
        found += sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())
        data = artifacts.get(payload["bundle"])
        (run / "models").mkdir(exist_ok=True)
        (run / "models" / "left").write_bytes(b"x" * 1000)
        Path(tempfile.gettempdir(), "litter").write_text("left")
        return {"size": len(data), "found": [one for one in found if one != payload["bundle"]]}

    def big(payload, context):
        return "b" * payload["size"]

    def chatty(payload, context):
        for size in payload["sizes"]:
            context.progress({"text": "c" * size})
        return len(payload["sizes"])

    def nap(payload, context):
        time.sleep(payload["seconds"])
        return payload["n"]

    def held(payload, context):
        while not Path(payload["until"]).exists():
            time.sleep(0.005)
        return "held"

    def secret(payload, context):
        return (state / "eval-secret").read_bytes().hex()

    return {
        handler.__name__: handler
        for handler in (echo, fetch, big, chatty, nap, held, secret, environment, die, reject)
    }
