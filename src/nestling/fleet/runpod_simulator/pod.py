"""One simulated pod: its states over time, its money, and the real worker process inside."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestling.fleet import process_tree
from nestling.fleet.runpod_simulator.script import PodFault, Stock
from nestling.fleet.worker_process import passed_on

__all__ = ["SimulatedPod"]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

_RESTART_PAUSE_S = 5.0
_LIVE = ("PROVISIONING", "STARTING", "RUNNING")
_ACTIONS: Mapping[str, Sequence[str]] = {
    "PROVISIONING": ("stop", "terminate"),
    "STARTING": ("stop", "terminate"),
    "RUNNING": ("stop", "restart", "terminate"),
    "EXITED": ("start", "terminate"),
    "ERROR": ("start", "terminate"),
}


@dataclass
class SimulatedPod:
    """Times are simulated seconds since the epoch."""

    id: str
    number: int
    """In the order of making, from 1."""
    body: dict[str, Any]
    """CreatePod as it was sent."""
    stock: Stock
    created_at: float
    boot_s: float
    faults: tuple[PodFault, ...]
    folder: Path
    key: str
    """The pod's own, for calls from inside."""
    environment: dict[str, str]
    """With secrets filled in; never shown."""
    rng: random.Random
    forced: str | None = None
    """Status that is not a matter of time."""
    vanished: bool = False
    deleted_at: float | None = None
    started_at: float | None = None
    """Of the container, anew at each restart."""
    worker_at: float | None = None
    """Of its first worker."""
    billed_usd: float = 0.0
    ports: dict[int, int] = field(default_factory=dict)
    stale_ports: dict[int, int] | None = None
    log: list[tuple[float, str, str]] = field(default_factory=list)
    """When, source, line."""
    num_starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    is_frozen: bool = False
    has_machine: bool = True
    """Its GPUs are not in stock."""
    _done: set[int] = field(default_factory=set)
    _again_at: float = 0.0

    @property
    def name(self) -> str:
        """As it was asked for or renamed."""
        return str(self.body["name"])

    @property
    def usd_per_hour(self) -> float:
        """What the API calls cost; it stays after a stop."""
        return self.stock.usd_per_hour * self.count

    @property
    def count(self) -> int:
        """GPUs."""
        return int(self.body["gpu"].get("count", 1)) if "gpu" in self.body else 1

    def fault(self, *kinds: str) -> PodFault | None:
        """The first scripted one of these kinds."""
        return next((one for one in self.faults if one.do in kinds), None)

    def status(self, now: float) -> str:
        """What the API says of it."""
        if self.forced is not None:
            return self.forced
        age_s = now - self.created_at
        if self.fault("early_running", "no_runtime"):
            return "RUNNING"
        if age_s < self.boot_s / 3:
            return "PROVISIONING"
        if age_s < self.boot_s:
            return "STARTING"
        return "ERROR" if self.fault("error") else "RUNNING"

    def actions(self, now: float) -> Sequence[str]:
        """What may be done with it now."""
        return _ACTIONS.get(self.status(now), ())

    def is_billed(self, now: float) -> bool:
        """Whether compute is charged."""
        return self.deleted_at is None and self.status(now) in _LIVE

    def is_listed(self, now: float, list_lag_s: float) -> bool:
        """Whether the list shows it."""
        if self.vanished:
            return False
        lag = self.fault("list_lag")
        if now - self.created_at < (lag.seconds if lag else list_lag_s):
            return False
        return self._is_seen(now)

    def is_found(self, now: float) -> bool:
        """Whether its own address shows it."""
        lag = self.fault("get_lag")
        if self.vanished or (lag is not None and now - self.created_at < lag.seconds):
            return False
        return self._is_seen(now)

    def _is_seen(self, now: float) -> bool:
        if self.deleted_at is None:
            return True
        lag = self.fault("delete_lag")
        return lag is not None and now - self.deleted_at < lag.seconds

    def show(self, now: float) -> dict[str, Any]:
        """The pod as the API shows it; its environment as it was sent."""
        body, status = self.body, self.status(now)
        ports, self.stale_ports = (
            (self.stale_ports, None) if self.stale_ports is not None else (self.ports, None)
        )
        runtime = None
        if status == "RUNNING" and self.started_at is not None and not self.fault("no_runtime"):
            shown = [
                {"private": private, "public": public, "type": "tcp", "ip": "127.0.0.1"}
                for private, public in ports.items()
            ]
            shown.insert(0, {"private": 19123, "public": 19123, "type": "http", "ip": "10.0.0.1"})
            runtime = {
                "uptime": round(now - self.started_at, 3),
                "gpus": [{"util": 0, "memoryUtil": 0}] * self.count,
                "cpu": {"util": 0},
                "memory": {"util": 0},
                "ports": shown,
            }
        return {
            "id": self.id,
            "name": self.name,
            "status": status,
            "actions": list(self.actions(now)),
            "image": body.get("image"),
            "env": body.get("env", {}),
            "ports": body.get("ports", []),
            "gpu": {"id": self.stock.gpu, "count": self.count, "vcpuCount": 8, "memory": 32},
            "cloud": self.stock.cloud,
            "dataCenterId": self.stock.data_center,
            "cudaVersion": "12.8",
            "cost": self.usd_per_hour,
            "locked": bool(body.get("locked")) or self.fault("lock") is not None,
            "createdAt": self.created_at,
            "startedAt": self.started_at,
            "runtime": runtime,
            "ssh": {"proxy": None, "direct": None},
        }

    def settle(self, now: float) -> None:
        """Do what is due: start the container, play its faults, start it again when it exited."""
        if self.deleted_at is not None or self.vanished or self.forced is not None:
            return
        if self.worker_at is None:
            is_due = now - self.created_at >= self.boot_s
            if is_due and not self.fault("no_runtime", "error"):
                self.worker_at = now
                self.start(now)
            return
        for index, fault in enumerate(self.faults):
            if index not in self._done and now - self.worker_at >= fault.after_s:
                self._done.add(index)
                self._play(fault, now)
        if self.forced is None and self.process is not None and self.process.poll() is not None:
            self._restart(now)

    def start(self, now: float) -> None:
        """Start the container: the disk is fresh, ports are new."""
        self.ports = {
            int(port.split("/")[0]): self.rng.randrange(20_000, 60_000)
            for port in self.body.get("ports", [])
        }
        self.started_at = now
        self.num_starts += 1
        self.is_frozen = False
        shutil.rmtree(self.folder / "disk", ignore_errors=True)
        (self.folder / "disk").mkdir(parents=True)
        self.log.append((now, "system", f"start container, try {self.num_starts}"))
        with (self.folder / "container.log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 (the run's own command, as in a pod)
                self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def end_process(self) -> None:
        """Kill the container with all that runs in it and wipe its disk; blocks for a moment."""
        if self.process is None:
            return
        process_tree.end_tree(self.process.pid, self._marker)
        self.process.wait()
        self.is_frozen = False
        shutil.rmtree(self.folder / "disk", ignore_errors=True)

    @property
    def is_alive(self) -> bool:
        """Whether its container runs and can act."""
        return self.process is not None and self.process.poll() is None and not self.is_frozen

    def container_log(self) -> list[str]:
        """What its worker printed."""
        try:
            return (self.folder / "container.log").read_text("utf-8", "replace").splitlines()
        except OSError:
            return []

    def _restart(self, now: float) -> None:
        """A container whose command ends is started again, and billed on."""
        if self._again_at == 0.0:
            self._again_at = now + _RESTART_PAUSE_S
            self.log.append((now, "system", "container exited; it is started again"))
        elif now >= self._again_at:
            self._again_at = 0.0
            self.start(now)
            if self.fault("crash_loop"):
                self._signal(signal.SIGKILL)

    def _play(self, fault: PodFault, now: float) -> None:
        if fault.do == "freeze":
            self.is_frozen = True
            self._signal(signal.SIGSTOP)
        elif fault.do in ("kill", "crash_loop"):
            self._signal(signal.SIGKILL)
        elif fault.do == "exit":
            self.forced = "EXITED"
            self._signal(signal.SIGKILL)
        elif fault.do == "vanish":
            self.vanished = True
            self._signal(signal.SIGKILL)
        else:
            return
        self.log.append((now, "system", f"fault: {fault.do}"))

    def _signal(self, number: signal.Signals) -> None:
        """To the container's first process and, for a freeze, to everything below it."""
        if self.process is None or self.process.poll() is not None:
            return
        pids = [self.process.pid]
        if number == signal.SIGSTOP:
            pids += sorted(process_tree.tree(self.process.pid, self._marker))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _command(self) -> list[str]:
        """What CreatePod asked for, else what docs/runpod.md makes the image's own command."""
        entrypoint, arguments = self.body.get("entrypoint"), self.body.get("cmd")
        if entrypoint or arguments:
            return [*(entrypoint or ()), *(arguments or ())]
        return ["python", "-m", "nestling.fleet.pods.worker"]

    def _image(self) -> Path:
        """The folder of the image's programs: this Python. What is to be installed is taken to be there."""
        options = " -I -S" if self.fault("empty_image") else ""
        pip = "exec sleep infinity" if self.fault("install_hangs") else "exit 0"
        folder = self.folder.resolve() / "image"
        folder.mkdir(parents=True, exist_ok=True)
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$1 $2" != "-m pip" ] || {pip}\n'
            f'exec {shlex.quote(sys.executable)}{options} "$@"\n'
        )
        python.chmod(0o755)
        return folder

    @property
    def _marker(self) -> str:
        return f"simulated-pod/{os.getpid()}/{self.id}"

    def _environment(self) -> dict[str, str]:
        platform = {
            "RUNPOD_POD_ID": self.id,
            "RUNPOD_API_KEY": self.key,
            "RUNPOD_DC_ID": self.stock.data_center,
            "RUNPOD_GPU_COUNT": str(self.count),
            "NESTLING_POD_FOLDER": str(self.folder.resolve() / "disk" / "pod"),
            process_tree.MARKER: self._marker,
        }
        if "PYTHONPATH" in os.environ:
            platform["PYTHONPATH"] = os.environ["PYTHONPATH"]
        inherited = passed_on()
        programs = {"PATH": f"{self._image()}{os.pathsep}{inherited.get('PATH', os.defpath)}"}
        return inherited | self.environment | platform | programs


def _end_with_parent() -> None:
    """In the new process: be killed when the simulator is (Linux); no pod outlives its account."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
