"""The workspace keeps every path inside and every file plain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.agent.workspace import Workspace, WorkspaceError, WorkspaceLimits

STARTING = {
    "INSTRUCTIONS.md": "how\n",
    "TASK.md": "what\n",
    "tools/__init__.py": "TOOLS = 1\n",
    "environment/taskset.py": "a = 1\nb = 1\n",
}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "w", STARTING)


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_starting_files_are_listed_and_read(workspace: Workspace) -> None:
    assert workspace.paths() == sorted(STARTING)
    assert workspace.read("tools/__init__.py") == "TOOLS = 1\n"
    assert workspace.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("path", ["job.toml", "environment/a/b.py", "data/rows.json", "./job.toml"])
def test_own_files_survive_a_round_trip(workspace: Workspace, path: str) -> None:
    text = "x = 'é'\r\n\ttail"
    assert workspace.write(path, text) == len(text.encode())
    assert workspace.read(path) == text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("~/x", "absolute"),
        ("\\\\host\\x", "absolute"),
        ("../x", "leaves the workspace"),
        ("environment/../../x", "leaves the workspace"),
        ("environment/..", "leaves the workspace"),
        (".", "not allowed"),
        ("environment//x.py", "not allowed"),
        ("environment/", "not allowed"),
        ("environment/a\x00b", "not allowed"),
        ("environment/a\nb", "not allowed"),
        ("environment/.hidden", "not allowed"),
        ("environment/tаskset.py", "not allowed"),  # a Cyrillic letter
        ("environment/ﬁle.py", "not allowed"),  # a ligature
        ("environment/\ud800", "not allowed"),
        ("environment/a\\b", "not allowed"),
        ("environment/" + "x/" * 10 + "y", "levels"),
        ("environment/" + "x" * 200, "characters"),
        ("job.toml/x", "read-only"),
        ("INSTRUCTIONS.md", "read-only"),
        ("TASK.md", "read-only"),
        ("tools/__init__.py", "read-only"),
        ("tools/new.py", "read-only"),
        ("reward.txt", "read-only"),
        ("Job.toml", "read-only"),
        ("environment", "read-only"),
        ("environment/TASKSET.py", "use taskset.py"),
        ("environment/taskset.py/x", "not a folder"),
    ],
)
def test_bad_path_is_refused_and_changes_nothing(
    workspace: Workspace, path: str, says: str
) -> None:
    before = snapshot(workspace.root)
    with pytest.raises(WorkspaceError, match=says):
        workspace.write(path, "x")
    assert snapshot(workspace.root) == before


def test_twin_folders_are_refused(workspace: Workspace) -> None:
    workspace.write("environment/sub/a.py", "")
    with pytest.raises(WorkspaceError, match="use sub"):
        workspace.write("environment/Sub/b.py", "")


def test_symlinks_are_never_followed(workspace: Workspace, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.py"
    secret.write_text("secret")
    (workspace.root / "environment" / "link.py").symlink_to(secret)
    (workspace.root / "environment" / "folder").symlink_to(outside)
    (workspace.root / "data").symlink_to(outside)
    for path in ("environment/link.py", "environment/folder/secret.py", "data/secret.py"):
        with pytest.raises(WorkspaceError):
            workspace.read(path)
        with pytest.raises(WorkspaceError):
            workspace.write(path, "x")
    assert secret.read_text() == "secret"
    assert workspace.paths() == sorted(STARTING)


def test_hard_links_pipes_and_folders_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = workspace.root / "environment"
    os.link(secret, folder / "hard.py")
    os.mkfifo(folder / "pipe.py")
    (folder / "sub.py").mkdir()
    for name, says in [("hard.py", "link"), ("pipe.py", "special"), ("sub.py", "folder")]:
        for act in (workspace.read, lambda path: workspace.write(path, "x")):
            with pytest.raises(WorkspaceError, match=says):
                act(f"environment/{name}")
    assert secret.read_text() == "secret"


def test_non_utf8_file_gets_a_clear_message_and_can_be_replaced(workspace: Workspace) -> None:
    (workspace.root / "environment" / "latin.py").write_bytes(b"a = '\xe9'")
    with pytest.raises(WorkspaceError, match=r"latin.py is not UTF-8 text \(byte 5\)"):
        workspace.read("environment/latin.py")
    with pytest.raises(WorkspaceError, match="not UTF-8"):
        workspace.edit("environment/latin.py", "a", "b")
    workspace.write("environment/latin.py", "a = 1")
    assert workspace.read("environment/latin.py") == "a = 1"


@pytest.mark.parametrize(
    ("content", "says"), [("\ud800", "surrogate"), ("a\x00", "NUL"), ("é" * 60, "120 bytes")]
)
def test_bad_content_is_refused(tmp_path: Path, content: str, says: str) -> None:
    workspace = Workspace.create(tmp_path / "w", {}, WorkspaceLimits(max_file_bytes=100))
    with pytest.raises(WorkspaceError, match=says):
        workspace.write("job.toml", content)
    assert workspace.paths() == []


def test_oversize_write_and_growth_by_edit_are_refused(tmp_path: Path) -> None:
    limits = WorkspaceLimits(max_file_bytes=100, max_total_bytes=150)
    workspace = Workspace.create(tmp_path / "w", {}, limits)
    workspace.write("job.toml", "x" * 99)
    with pytest.raises(WorkspaceError, match="over 100 bytes"):
        workspace.edit("job.toml", "x" * 99, "y" * 101)
    with pytest.raises(WorkspaceError, match="all files together"):
        workspace.write("data/a.txt", "x" * 60)
    workspace.write("job.toml", "y" * 100)  # replacing does not count twice
    assert workspace.read("job.toml") == "y" * 100


@pytest.mark.long
def test_ten_thousand_files_stop_at_the_cap(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", STARTING, WorkspaceLimits(max_files=20))
    room = 20 - len(STARTING)
    for index in range(room):
        workspace.write(f"data/f{index}.txt", "x")
    for index in range(room, 10_000):
        with pytest.raises(WorkspaceError, match="too many files"):
            workspace.write(f"data/f{index}.txt", "x")
    assert len(workspace.paths()) == 20


def test_ten_thousand_planted_files_neither_slow_nor_flood(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", STARTING)
    (workspace.root / "data").mkdir()
    for index in range(10_000):
        (workspace.root / "data" / f"f{index}").touch()
    assert len(workspace.paths()) <= workspace.limits.max_files
    with pytest.raises(WorkspaceError, match="too many files"):
        workspace.write("job.toml", "x")


def test_failed_write_keeps_the_old_text(workspace: Workspace, tmp_path: Path) -> None:
    workspace.write("job.toml", "old")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    (workspace.root / ".nestling-write").mkdir()  # the scratch file cannot be opened
    with pytest.raises(WorkspaceError, match="the old text is kept"):
        workspace.write("job.toml", "new")
    assert workspace.read("job.toml") == "old"
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_edit_replaces_what_occurs_once(workspace: Workspace) -> None:
    workspace.edit("environment/taskset.py", "a = 1", "a = 2")
    assert workspace.read("environment/taskset.py") == "a = 2\nb = 1\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (" = 1", " = 2", "occurs 2 times"),
        ("c = 1", "c", "not found in environment/taskset.py"),
        ("", "x", "old is empty"),
        ("a = 1", "a = 1", "the same text"),
    ],
)
def test_edit_that_is_not_unique_is_refused(
    workspace: Workspace, old: str, new: str, says: str
) -> None:
    with pytest.raises(WorkspaceError, match=says):
        workspace.edit("environment/taskset.py", old, new)
    assert workspace.read("environment/taskset.py") == STARTING["environment/taskset.py"]


def test_edit_counts_overlapping_occurrences(workspace: Workspace) -> None:
    workspace.write("job.toml", "aaa")
    with pytest.raises(WorkspaceError, match="occurs 2 times"):
        workspace.edit("job.toml", "aa", "b")


def test_edit_of_a_missing_or_read_only_file_is_refused(workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError, match=r"no such file job\.toml"):
        workspace.edit("job.toml", "a", "b")
    with pytest.raises(WorkspaceError, match="read-only"):
        workspace.edit("TASK.md", "what", "that")


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "",
        "environment",
        "data",
        "job.toml",
        "/",
        "\\",
        "~",
        "\x00",
        "link",
        "a",
        "A",
        "é",
    ]
)
PATHS = st.one_of(
    st.text(max_size=40), st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=6).map("/".join)
)


@pytest.mark.long
@given(paths=st.lists(PATHS, max_size=6))
@settings(max_examples=150, deadline=None)
def test_no_path_leaves_the_workspace(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    base = tmp_path_factory.mktemp("law")
    outside = base / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    workspace = Workspace.create(base / "w", STARTING)
    (workspace.root / "environment" / "link").symlink_to(outside)
    for path in paths:
        for act in (
            lambda path: workspace.write(path, "x"),
            workspace.read,
            lambda path: workspace.edit(path, "x", "y"),
        ):
            try:
                text = act(path)
            except WorkspaceError:
                continue
            assert text != "secret"
    assert snapshot(base / "outside") == {"secret": b"secret"}
    assert {entry.name for entry in base.iterdir()} == {"outside", "w"}
    for name in ("INSTRUCTIONS.md", "TASK.md", "tools/__init__.py"):
        assert workspace.read(name) == STARTING[name]


@pytest.mark.parametrize("path", ["job.toml", "./job.toml", "././job.toml"])
def test_a_manifest_is_too_short_to_take_long_to_parse(tmp_path, path):
    workspace = Workspace.create(tmp_path / "w", {})
    with pytest.raises(WorkspaceError, match="4096"):
        workspace.write(path, ".".join("a" * 4096) + " = 1")


def test_counting_occurrences_ends_soon(tmp_path):
    workspace = Workspace.create(tmp_path / "w", {})
    workspace.write("data/x.txt", "a" * 131_072)
    with pytest.raises(WorkspaceError, match="50 times or more"):
        workspace.edit("data/x.txt", "a" * 65_536, "b")
