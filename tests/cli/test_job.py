import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import psutil
import pytest

from nestling.families.registry import ALL
from nestling.jobs.template import template_job

from .conftest import EXAMPLES, START, Run, can_run

LEDGER = str(EXAMPLES / "ledger")
FEW_ITEMS = ("--set", "inner.leak_items=16")
OUTCOME_FIELDS = {
    "status", "reason", "base_model", "family", "pre", "post", "uplift", "uplift_ci", "n",
    "train_steps", "cpu_s", "wall_s", "usd", "job_hash",
}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A copy of the ledger example that may be broken."""
    return shutil.copytree(EXAMPLES / "ledger", tmp_path / "ledger")


@pytest.mark.long
def test_a_good_job_is_accepted_without_any_network(process: Run) -> None:
    cut_off = ["unshare", "-n"] if can_run("unshare", "-n", "true") else []
    done = process("job", "check", LEDGER, *FEW_ITEMS, "--json", before=cut_off)
    assert done.code == 0, done.err
    last = done.last
    assert {"ok", "attempts_left", "messages", "predicted"} <= set(last)
    assert (last["ok"], last["attempts_left"], last["messages"]) == (True, None, [])
    assert last["predicted"]["cpu_s"] > 0
    assert "budget" in done.err, "stages are progress"
    assert len(done.out.splitlines()) == 2


@pytest.mark.parametrize("action", ["check", "run"])
@pytest.mark.parametrize(
    ("path", "content", "code"),
    [
        ("job.toml", b'\xff\xfe base_model = "micro"', "files.not_utf8"),
        ("job.toml", b'base_model = "micro', "schema."),
        ("job.toml", b'base_model = "micro"\n[prime_rl]\nlrr = 1e-3\n', "schema.unknown_key"),
        ("job.toml", b'base_model = "micro"\n[prime_rl]\nmax_steps = "ten"\n', "schema."),
        ("environment/__init__.py", None, "files.missing"),
        ("job.toml", None, "files.missing"),
        ("environment/taskset.py", b"# caf\xe9\n", "files.not_utf8"),
    ],
)
def test_a_broken_job_is_rejected_with_fixes(
    here: Run, job: Path, action: str, path: str, content: bytes | None, code: str
) -> None:
    if content is None:
        (job / path).unlink()
    else:
        (job / path).write_bytes(content)
    before = {one: one.read_bytes() for one in job.rglob("*") if one.is_file()}
    done = here("job", action, str(job), "--json", "--set", "unsafe_no_jail=true")
    assert done.code == 1
    message = done.last["messages"][0]
    assert message["code"].startswith(code)
    assert all(message[key] for key in ("stage", "wrong", "expected", "fix"))
    assert message["fix"] in done.out.splitlines()[0]
    if action == "check":
        assert done.last["ok"] is False
    else:
        assert set(done.last) >= OUTCOME_FIELDS
        assert (done.last["status"], done.last["family"]) == ("rejected", "ledger")
        assert done.last["reason"] == message["code"]
    assert before == {one: one.read_bytes() for one in job.rglob("*") if one.is_file()}


@pytest.mark.parametrize("action", ["check", "run", "show"])
def test_what_is_no_job_folder_is_a_usage_error(here: Run, tmp_path: Path, action: str) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "file").write_text("x")
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "ledger", "is not a job folder"),
        (tmp_path / "file", "is not a folder"),
    ):
        done = here("job", action, str(path))
        assert done.code == 2
        assert words in done.err
        assert "examples/" in done.err


@pytest.mark.long
def test_family_is_the_folders_name_or_asked_for(here: Run, job: Path) -> None:
    job.joinpath("job.toml").write_text("base_model = 3\n")
    for name, code in (("ledger-2", 1), ("calc_chain.slow", 1), ("mine", 2), ("ledgers", 2)):
        job = job.rename(job.parent / name)
        assert here("job", "check", str(job), *FEW_ITEMS).code == code, name
    done = here("job", "check", str(job))
    assert "--family" in done.err
    assert here("job", "check", str(job), "--family", "ledger", *FEW_ITEMS).code == 1
    assert here("job", "check", str(job), "--family", "ledgers").code == 2


def test_show_prints_settings_with_defaults(here: Run) -> None:
    done = here("job", "show", LEDGER, "--json")
    template = template_job("ledger")
    assert done.code == 0
    assert done.last["job_hash"] == template.job_hash
    assert done.last["prime_rl"] == template.manifest().prime_rl.model_dump()
    assert set(done.last["explicit_keys"]) == set(template.manifest().explicit_keys)
    assert done.last["files"]["job.toml"] == len(template.files["job.toml"])


@pytest.mark.parametrize("family", ALL)
def test_render_writes_rl_toml(here: Run, tmp_path: Path, family: str) -> None:
    out = tmp_path / "rl.toml"
    common = ["job", "render", str(EXAMPLES / family), "--trainer", "prime_rl"]
    done = here(*common, "--base-model", "qwen3-0.6b", "--out", str(out))
    assert (done.code, done.out) == (0, "")
    document = tomllib.loads(out.read_text())
    assert document["model"]["name"] == "Qwen/Qwen3-0.6B"
    assert document["run"]["name"].startswith(family)
    assert document["max_steps"] == template_job(family).manifest().prime_rl.max_steps
    assert here(*common, "--base-model", "qwen3-0.6b", "--out", "-").out == out.read_text()


def test_render_to_a_place_that_cannot_be_written_fails(here: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = here(
        "job", "render", LEDGER, "--trainer", "prime_rl", "--base-model", "m",
        "--out", str(tmp_path / "file" / "rl.toml"),
    )  # fmt: skip
    assert done.code == 1
    assert "cannot write" in done.err


HIDE = ["unshare", "-m", "sh", "-c"]
HIDDEN = 'for x in $(which -a bwrap); do mount --bind /dev/null "$x"; done; exec "$@"'


@pytest.mark.long
@pytest.mark.skipif(
    not can_run(*HIDE, "mount --bind /dev/null $(which bwrap)"),
    reason="hiding a program needs a mount namespace",
)
@pytest.mark.parametrize(
    "arguments", [["job", "check", LEDGER], ["episode", "--policy", "noop", "--family", "ledger"]]
)
def test_missing_bubblewrap_says_how_to_install_it(process: Run, arguments: list[str]) -> None:
    done = process(*arguments, before=[*HIDE, HIDDEN, "sh"])
    assert done.code == 2
    assert "apt-get install bubblewrap" in done.err
    assert done.out == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_trains_and_scores(process: Run, tmp_path: Path) -> None:
    cut_off = ["unshare", "-n"] if can_run("unshare", "-n", "true") else []
    job = _small(tmp_path)
    kept = tmp_path / "kept"
    done = process(
        "job", "run", str(job), "--eval-items", "16", "--seed", "3", "--keep-model", str(kept),
        *FEW_ITEMS, "--json", before=cut_off,
    )  # fmt: skip
    assert done.code == 0, done.err
    last = done.last
    assert set(last) >= OUTCOME_FIELDS
    assert (last["status"], last["n"], last["train_steps"]) == ("succeeded", 16, 2)
    assert last["uplift"] == pytest.approx(last["post"] - last["best_pre"])
    assert last["uplift_ci"][0] <= last["uplift"] <= last["uplift_ci"][1]
    assert "step 2/2" in done.err
    assert (kept / last["model_ref"] / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_dies_in_training_is_code_1(process: Run, tmp_path: Path) -> None:
    job = _small(tmp_path, max_steps=16)
    taskset = job / "environment" / "taskset.py"
    text = taskset.read_text()
    # More rollouts than a probe plays, fewer than the training.
    dies = "        CALLS.append(1)\n        assert len(CALLS) < 200\n        return float("
    assert text.count("        return float(") == 1
    text = text.replace("        return float(", dies).replace(
        "\n\nclass", "\nCALLS = []\n\nclass", 1
    )
    taskset.write_text(text)
    done = process("job", "run", str(job), "--eval-items", "16", *FEW_ITEMS, "--json")
    assert done.code == 1, done.out
    assert set(done.last) >= OUTCOME_FIELDS
    assert done.last["status"] == "failed"
    assert done.last["reason"].startswith("env.")
    assert (done.last["post"], done.last["uplift"]) == (None, None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interruption_is_code_130_and_leaves_no_process(tmp_path: Path) -> None:
    job = _small(tmp_path, max_steps=16)
    with subprocess.Popen(
        [*START, "job", "run", str(job), "--eval-items", "16", *FEW_ITEMS],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("step 1/"):
                break
        children = psutil.Process(running.pid).children(recursive=True)
        assert children
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(30) == 130
    assert "interrupted" in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def _small(tmp_path: Path, max_steps: int = 2) -> Path:
    """The ledger example with little to do."""
    folder = shutil.copytree(EXAMPLES / "ledger", tmp_path / "ledger")
    folder.joinpath("job.toml").write_text(
        'base_model = "nano"\n\n[prime_rl]\nlr = 3e-4\nbatch_size = 16\ngroup_size = 8\n'
        f"max_steps = {max_steps}\n"
    )
    return folder
