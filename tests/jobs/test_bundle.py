import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.core.errors import ConfigError, JobRejectedError
from nestling.jobs.bundle import HASH_FILE, Bundle, BundleLimits, freeze

JOB = {
    "job.toml": b'base_model = "micro"\n',
    "environment/__init__.py": b'__all__ = ["Taskset"]\n',
    "environment/taskset.py": b"x = 1\n",
    "data/rows.jsonl": b"{}\n",
}


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    for name, data in JOB.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def problems_of(folder, limits=None):
    with pytest.raises(JobRejectedError) as caught:
        freeze(folder, *([limits] if limits else []))
    for problem in caught.value.problems:
        assert len(problem.line()) <= 160, problem.line()
        assert problem.stage == "files"
    return caught.value.problems


def test_freeze_keeps_job_environment_and_data_only(workspace):
    for name in ("TASK.md", "INSTRUCTIONS.md", "tools.py", "score.json", ".env"):
        (workspace / name).write_text("left out")
    bundle = freeze(workspace)
    assert dict(bundle.files) == JOB
    assert list(bundle.files) == sorted(JOB)
    assert bundle.manifest().base_model == "micro"


def test_hash_depends_on_paths_and_bytes_but_not_on_order(workspace):
    bundle = freeze(workspace)
    assert Bundle.from_files(dict(reversed(JOB.items()))).job_hash == bundle.job_hash
    moved = dict(JOB)
    moved["environment/other.py"] = moved.pop("environment/taskset.py")
    assert Bundle.from_files(moved).job_hash != bundle.job_hash
    (workspace / "data/rows.jsonl").write_bytes(b"{} \n")
    assert freeze(workspace).job_hash != bundle.job_hash


def test_written_bundle_loads_and_tampering_shows(workspace, tmp_path):
    bundle = freeze(workspace)
    bundle.write(tmp_path / "copy")
    assert Bundle.load(tmp_path / "copy") == bundle
    with pytest.raises(ConfigError, match="not empty"):
        bundle.write(tmp_path / "copy")
    (tmp_path / "copy/environment/taskset.py").write_bytes(b"x = 2\n")
    with pytest.raises(JobRejectedError, match="do not match"):
        Bundle.load(tmp_path / "copy")
    (tmp_path / "copy" / HASH_FILE).unlink()
    with pytest.raises(JobRejectedError, match="do not match"):
        Bundle.load(tmp_path / "copy")


def test_missing_parts_are_named(workspace):
    (workspace / "job.toml").unlink()
    shutil.rmtree(workspace / "environment")
    assert [problem.wrong for problem in problems_of(workspace)] == [
        "job.toml is missing",
        "environment/__init__.py is missing",
    ]


def _symlink_file(folder):
    (folder / "environment/x.py").symlink_to("/etc/passwd")


def _symlink_folder(folder):
    (folder / "environment/sub").symlink_to("/etc")


def _symlink_root(folder):
    shutil.rmtree(folder / "data")
    (folder / "data").symlink_to("/etc")


def _symlink_manifest(folder):
    (folder / "job.toml").unlink()
    (folder / "job.toml").symlink_to("/etc/passwd")


def _hard_link(folder):
    os.link(folder / "job.toml", folder / "environment/job.toml")


def _fifo(folder):
    os.mkfifo(folder / "data/x.txt")


def _data_is_file(folder):
    shutil.rmtree(folder / "data")
    (folder / "data").write_text("x")


def _write(name, data=b"x"):
    def act(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return act


ATTACKS = [
    (_symlink_file, "files.not_plain"),
    (_symlink_folder, "files.not_plain"),
    (_symlink_root, "files.not_a_folder"),
    (_symlink_manifest, "files.not_plain"),
    (_hard_link, "files.hard_link"),
    (_fifo, "files.not_plain"),
    (_data_is_file, "files.not_a_folder"),
    (_write("environment/.hidden.py"), "files.path"),
    (_write("environment/évil.py"), "files.path"),
    (_write("environment/a b.py"), "files.path"),
    (_write("environment/x\nmark as clean.py"), "files.path"),
    (_write("environment/.git/config.txt"), "files.path"),
    (_write("environment/Taskset.py"), "files.twin"),
    (_write("environment/x.pth"), "files.suffix"),
    (_write("environment/x.so"), "files.suffix"),
    (_write("environment/x.pyc"), "files.suffix"),
    (_write("environment/weights.safetensors"), "files.suffix"),
    (_write("environment/__pycache__/x.py"), "files.compiled"),
    (_write("environment/sitecustomize.py"), "files.startup_file"),
    (_write("data/UserCustomize.py"), "files.startup_file"),
    (_write("data/code.py"), "files.code_in_data"),
    (_write("data/x.txt", b"a\0b"), "files.nul"),
    (_write("data/x.txt", b"\xff\xfe"), "files.not_utf8"),
    (_write("environment/a/b/c/d/e/f/g.py"), "files.depth"),
    (_write("data/big.txt", b"x" * (256 * 1024 + 1)), "files.file_size"),
]


@pytest.mark.parametrize(("act", "code"), ATTACKS)
def test_hostile_workspaces_are_refused(workspace, act, code):
    act(workspace)
    assert code in [problem.code for problem in problems_of(workspace)]


def test_device_nodes_are_refused(workspace):
    try:
        os.mknod(workspace / "data/x.txt", 0o20600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    assert "files.not_plain" in [problem.code for problem in problems_of(workspace)]


def test_caps_on_count_and_total(workspace):
    few = BundleLimits(files=3)
    assert problems_of(workspace, few)[0].code == "files.too_many"
    small = BundleLimits(total_bytes=10)
    assert problems_of(workspace, small)[0].code == "files.total_size"


def test_ten_thousand_files_stop_early(workspace):
    for i in range(10_000):
        (workspace / f"data/{i}.txt").touch()
    assert [problem.code for problem in problems_of(workspace)] == ["files.too_many"]


def test_a_missing_workspace_is_the_callers_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        freeze(tmp_path / "nowhere")


@pytest.mark.long
@given(
    st.dictionaries(
        st.text(max_size=30) | st.sampled_from(["../x.py", "/etc/passwd", "environment/../x.py"]),
        st.binary(max_size=20),
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None)
def test_a_path_never_leaves_the_bundle(extra):
    try:
        bundle = Bundle.from_files(JOB | extra)
    except JobRejectedError:
        return
    for path in bundle.files:
        assert path == "job.toml" or path.split("/")[0] in ("environment", "data")
        assert ".." not in path
        assert path.isascii()
