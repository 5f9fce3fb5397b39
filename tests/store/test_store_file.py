"""The file itself: upgrade, damage, a full disk, a lock, a kill, a reader."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.core.errors import StoreError
from nestling.core.rundir import ArtifactStore, RunDir, write_atomic
from nestling.store import GroupCommit, RunStore
from nestling.store.connection import Connection
from nestling.store.schema import RUN


def test_reader_sees_what_is_committed_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunStore(path) as writer, RunStore.open_reader(path) as reader:
        writer.set_meta("commitment", "abc")
        assert reader.meta("commitment") == "abc"
        with pytest.raises(StoreError, match="read-only"):
            reader.set_meta("x", "y")


def test_reader_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run store"):
        RunStore.open_reader(tmp_path / "run.db")


def test_foreign_and_newer_and_damaged_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(StoreError, match="no run store"):
        RunStore(foreign)
    newer = tmp_path / "newer.db"
    RunStore(newer).close()
    with sqlite3.connect(newer) as other:
        other.execute(f"PRAGMA user_version = {RUN.version + 1}")
    other.close()
    with pytest.raises(StoreError, match="install the newer"):
        RunStore(newer)
    (tmp_path / "text.db").write_text("this is no database, it is a text" * 100)
    with pytest.raises(StoreError, match="damaged"):
        RunStore(tmp_path / "text.db")


def test_damaged_page_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunStore(path) as store:
        for number in range(200):
            store.set_meta(f"key{number}", "x" * 100)
    data = bytearray(path.read_bytes())
    data[8192:] = os.urandom(len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"), RunStore(path) as store:
        store.check()


def fill(store: RunStore) -> int:
    """Write until the disk is full; returns how many writes were acknowledged."""
    for number in range(1000):
        try:
            store.set_meta(f"key{number}", "x" * 4000)
        except StoreError as error:
            if "free disk space" not in str(error):
                raise
            return number
    pytest.fail("the disk never filled up")


def test_full_disk_is_an_error_and_keeps_the_data(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with RunStore(path) as store:
        store.set_meta("before", "kept")
        store.limit_pages(60)
        written = fill(store)
        assert store.meta("before") == "kept"
    with RunStore(path) as store:
        store.check()
        assert store.meta(f"key{written - 1}") is not None
        assert store.meta(f"key{written}") is None
        store.set_meta("after", "works again")
        assert len([event for event in store.events.since(0) if event.kind == "meta.set"]) == (
            written + 2
        )


def test_transaction_that_a_full_disk_ended_cannot_go_on(tmp_path: Path) -> None:
    def swallow_and_go_on(store: RunStore) -> None:
        with store.transaction():
            store.set_meta("first half", "x")
            with contextlib.suppress(StoreError):
                store.set_meta("too large", "x" * 1_000_000)
            store.set_meta("second half", "x")

    with RunStore(tmp_path / "run.db") as store:
        store.limit_pages(80)
        with pytest.raises(StoreError, match="undone after an earlier error"):
            swallow_and_go_on(store)
        assert (store.meta("first half"), store.meta("second half")) == (None, None)
        store.set_meta("later", "x")


def test_one_change_too_large_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store, GroupCommit(store) as writer:
        store.limit_pages(80)
        with store.transaction():  # holds the writer back, so that one batch takes all of these
            futures = [writer.submit(lambda n=n: store.set_meta(f"k{n}", "x")) for n in range(5)]
            large = writer.submit(lambda: store.set_meta("large", "x" * 1_000_000))
            futures += [
                writer.submit(lambda n=n: store.set_meta(f"k{n}", "x")) for n in range(5, 9)
            ]
        with pytest.raises(StoreError, match="free disk space"):
            large.result()
        assert [future.result() for future in futures] == [None] * 9
        assert [store.meta(f"k{n}") for n in range(9)] == ["x"] * 9


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_really_full_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        store = RunStore(folder / "run.db")
        written = fill(store)
        store.close()
        with RunStore(folder / "run.db") as store:
            assert store.meta(f"key{written - 1}") is not None
            assert store.meta(f"key{written}") is None
        with pytest.raises(StoreError, match="free space"):
            ArtifactStore(folder / "artifacts").put(b"x" * 2_000_000)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_long_lock_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    RunStore(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    connection = Connection(path, busy_timeout_s=0.05)
    with pytest.raises(StoreError, match="locked by another process"), connection.transaction():
        pass
    holder.execute("ROLLBACK")
    holder.close()
    with connection.transaction():
        connection.execute("INSERT INTO meta VALUES ('a', 'b')")
    connection.close()


_WRITER = """
import sys
from pathlib import Path
from nestling.store import RunStore
store = RunStore(Path(sys.argv[1]))
number = 0
while True:
    with store.transaction():
        store.set_meta("a", str(number))
        store.set_meta("b", str(number))
    print(number, flush=True)
    number += 1
"""


def test_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    for round_number in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(20 + 7 * round_number):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.stdout.close()
        process.wait()
        # The last line may itself be cut short by the kill.
        acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
        with RunStore(path) as store:
            value = store.meta("a")
            assert value is not None
            assert value == store.meta("b")
            assert int(value) in (acknowledged, acknowledged + 1)


def test_cut_wal_opens_with_whole_transactions_only(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    store = RunStore(path)
    for number in range(50):
        with store.transaction():
            store.set_meta("a", str(number))
            store.set_meta("b", str(number))
    database = path.read_bytes()
    wal = path.with_name("run.db-wal").read_bytes()
    store.close()
    for cut in range(0, len(wal), len(wal) // 23):
        copy = tmp_path / f"cut{cut}.db"
        copy.write_bytes(database)
        copy.with_name(copy.name + "-wal").write_bytes(wal[:cut])
        with RunStore(copy) as opened:
            assert opened.meta("a") == opened.meta("b")


def test_artifact_is_checked_against_its_name(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    digest = artifacts.put(b"weights")
    assert artifacts.put(b"weights") == digest
    assert artifacts.get(digest) == b"weights"
    artifacts.path(digest).write_bytes(b"other")
    with pytest.raises(StoreError, match="damaged"):
        artifacts.get(digest)
    with pytest.raises(StoreError, match="missing"):
        artifacts.get("0" * 64)
    with pytest.raises(ValueError, match="SHA-256"):
        artifacts.path("../../etc/passwd")


def test_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "config.toml", b"x = 1\n")
    write_atomic(tmp_path / "a" / "config.toml", b"x = 2\n")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.toml"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        write_atomic(tmp_path / "file" / "x", b"")


def test_one_controller_per_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with run.lock(), pytest.raises(StoreError, match="in use"), run.lock():
        pass
    with run.lock():
        pass
