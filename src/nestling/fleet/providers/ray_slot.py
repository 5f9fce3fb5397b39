"""One worker slot on a node of a Ray cluster: starts the worker process and relays its bytes.

`Slot` is an ordinary class; the gateway makes a Ray actor of it. The worker is a process of its own
rather than code inside the actor. So its heartbeats, its thread settings (which torch reads when it
is imported) and the kill of its whole tree are those of a local worker, what it prints stays out of
Ray's logs, and an actor that dies takes it along through the kernel's parent-death signal.

Bytes go through in pieces that Ray carries inside its calls, so the cluster's object store is never
used and cannot fill up on our account. Nothing is shared with the controller's disk: secrets and
bundles arrive by call and lie in a private folder of the node until its last slot leaves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from nestling import __version__
from nestling.core.errors import FleetError
from nestling.core.rundir import ArtifactStore, write_atomic
from nestling.fleet import process_tree
from nestling.fleet.slots import thread_settings
from nestling.fleet.worker_process import last_words, worker_command, worker_environment

__all__ = ["PIECE_BYTES", "NodeFolder", "Slot", "SlotSpec", "node_root"]

PIECE_BYTES: Final = 64 * 1024
"""Ray keeps arguments and results below 100 KiB out of the object store."""

FOLDER_VARIABLE: Final = "NESTLING_RAY_FOLDER"

_OWNER = re.compile(r"#(\d+)-(\d+)-(\d+)$")


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every slot of a run starts."""

    run_id: str
    handlers: str
    """`module:function` that makes the handlers; must be importable on the node."""
    settings: dict[str, Any]
    """JSON for that function; the slot adds `run` and `state`, folders of its node. No secrets."""
    beat_s: float
    environment: dict[str, str]
    """Added to the scrubbed environment of the worker."""
    version: str = __version__
    """Of this package, which must be the same on both sides."""


class Slot:
    """Runs at most one worker; methods may be called from several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: NodeFolder | None = None
        self._artifacts: ArtifactStore | None = None
        self._parts: dict[str, bytearray] = {}
        self._log = Path(os.devnull)
        self._marker = ""

    def node(self) -> str:
        """Ray's name of the node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, name: str, spec: SlotSpec, private: Mapping[str, bytes], node: str) -> int:
        """Start the worker `name`; returns its process id on the node.

        `private` are files of the state folder that only the worker's user may read; `node` names
        the node apart from others on the same machine. What dead slots left here is removed first.

        Raises:
            FleetError: another version of this package, or the worker cannot be started.
        """
        if spec.version != __version__:
            raise FleetError(
                f"nestling {__version__} on this node, {spec.version} at the controller; expected "
                f"the same; install nestling=={spec.version} on the nodes"
            )
        _end_orphans()
        root = node_root()
        NodeFolder.sweep(root)
        self._folder = folder = NodeFolder(root, f"{spec.run_id}-{node[:12]}")
        run, state = folder.path / "run", folder.path / "state"
        for path in (run / "logs", run / "artifacts", state):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, data in private.items():
            _write_private(state / file, data)
        self._artifacts = ArtifactStore(run / "artifacts")
        self._log = run / "logs" / f"{name}.log"
        self._marker = _marker(spec.run_id, name)
        settings = spec.settings | {"run": str(run), "state": str(state)}
        command = worker_command(spec.handlers, settings, spec.beat_s)
        environment = worker_environment(self._marker, thread_settings(1), spec.environment)
        return self._spawn(command, environment).pid

    def send(self, data: bytes) -> None:
        """Bytes for the worker; `FleetError` when it is gone."""
        process = self._running()
        assert process.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[process.stdin.write(view) :]
        except (OSError, ValueError) as error:
            raise FleetError("the worker is gone") from error

    def receive(self) -> bytes:
        """What the worker said since, at most `PIECE_BYTES`; waits. Empty: the worker is gone."""
        process = self._running()
        assert process.stdout is not None
        try:
            return process.stdout.read(PIECE_BYTES) or b""
        except (OSError, ValueError):
            return b""

    def keep(self, digest: str, part: bytes, last: bool) -> None:
        """A piece of an artifact; `FleetError` when the whole is not what its name says."""
        data = self._parts.setdefault(digest, bytearray())
        data += part
        if not last:
            return
        del self._parts[digest]
        if hashlib.sha256(data).hexdigest() != digest:
            raise FleetError(f"artifact {digest} arrived damaged; it is sent again with the job")
        assert self._artifacts is not None
        self._artifacts.put(bytes(data))

    def last_words(self) -> str:
        """The end of the worker's log."""
        return last_words(self._log)

    def stop(self) -> None:
        """End the worker with everything it started and leave the node's folder; may be repeated."""
        process, self._process = self._process, None
        if process is not None:
            left = process_tree.end_tree(process.pid, self._marker)
            if left:
                raise FleetError(
                    f"processes {left} cannot be ended; they are stuck in the kernel; restart the "
                    f"node if they stay"
                )
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.leave()
            NodeFolder.sweep(folder.path.parent)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise FleetError("the worker is gone")
        return self._process

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start it from a thread that lives as long as it does: the kernel ties it to its thread."""
        begun = threading.Event()
        errors: list[OSError] = []

        def work() -> None:
            try:
                with self._log.open("ab") as log:
                    process = self._process = subprocess.Popen(  # noqa: S603 (our own program)
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        bufsize=0,
                        start_new_session=True,
                    )
            except OSError as error:
                errors.append(error)
                return
            finally:
                begun.set()
            process.wait()

        threading.Thread(target=work, name="worker", daemon=True).start()
        begun.wait()
        if self._process is None:
            raise FleetError(
                f"cannot start a worker: {errors[0]}; expected free processes and memory, and "
                f"a writable {self._log.parent}"
            )
        return self._process


class NodeFolder:
    """A private folder that the slots of a node share; the last to leave removes it.

    Each slot holds a shared lock, which goes with its process, so that a folder nobody holds is a
    leftover.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self._lock = -1
        while self._lock < 0:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _lock(self.path, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Let go; remove the folder when nobody else holds it."""
        os.close(self._lock)
        _remove_unheld(self.path)

    @staticmethod
    def sweep(root: Path) -> None:
        """Remove folders whose slots are all dead."""
        for path in root.iterdir():
            _remove_unheld(path)


def node_root() -> Path:
    """Where node folders are: under $NESTLING_RAY_FOLDER or the temporary folder, for us alone."""
    parent = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    root = parent / f"nestling-{os.geteuid()}"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise FleetError(
            f"{root} is not a folder of ours alone; expected mode 0700 and this user as owner; "
            f"remove it, or set {FOLDER_VARIABLE} to another place"
        )
    return root


def _lock(folder: Path, how: int) -> int:
    """A descriptor that holds the folder's lock; -1 when the folder went away meanwhile."""
    path = folder / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, how)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return -1


def _remove_unheld(folder: Path) -> None:
    if not folder.is_dir():
        return
    descriptor = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor >= 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _write_private(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)
    path.chmod(0o600)


def _marker(run_id: str, name: str) -> str:
    """Run and worker, and which process owns it: pid namespace, pid, start time."""
    ticks = process_tree.start_ticks(os.getpid())
    return f"{run_id}/{name}#{_pid_namespace()}-{os.getpid()}-{ticks or 0}"


def _end_orphans() -> None:
    """End workers whose slot died in a way that left something of them."""
    here = _pid_namespace()
    orphans: set[str] = set()
    for process in psutil.process_iter():
        marker = process_tree.marker_of(process)
        owner = _OWNER.search(marker)
        if owner is None or int(owner[1]) != here:
            continue
        if not process_tree.is_running(int(owner[2]), int(owner[3])):
            orphans.add(marker)
    for marker in orphans:
        process_tree.end_tree(None, marker)


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
