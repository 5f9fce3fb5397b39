import tomllib

import pytest

from nestling.core.errors import ConfigError
from nestling.families.public_package import public_files
from nestling.jobs.bounds import LARGE, SMALL
from nestling.jobs.manifest import JobManifest
from nestling.jobs.rl_toml import RlRun, render_rl_toml, rl_document
from nestling.jobs.template import template_job

RUN = RlRun(name="job-1")

SETTINGS = [
    {},
    {"optimizer": "sgd", "momentum": 0.5},
    {"optimizer": "muon"},
    {"optimizer": "sign_sgd", "lora_rank": 0},
    {"scheduler": "linear", "warmup_steps": 2},
    {"scheduler": "cosine", "warmup_steps": 2, "min_lr": 1e-7},
    {"loss": "ipo", "ipo_threshold": 0.2},
    {"algo": "echo", "length_penalty": True},
    {"algo": "rae"},
    {"algo": "max_rl"},
    {"sampler": "difficulty_pool"},
    {"enable_thinking": True},
    {"group_size": 2, "batch_size": 16, "max_steps": 1},
    {"lora_rank": 64, "lora_alpha": 16.0, "lora_dropout": 0.1},
]


def document(model="qwen3-0.6b", **settings):
    manifest = JobManifest.build("qwen3-0.6b", bounds=LARGE, **settings)
    return tomllib.loads(render_rl_toml(manifest, model, RUN))


def at(table, path):
    for part in path.split("."):
        name, _, index = part.partition("[")
        table = table[name]
        if index:
            table = table[int(index.rstrip("]"))]
    return table


def test_every_setting_lands_at_its_place():
    settings = {"lr": 2e-5, "max_steps": 30, "batch_size": 32, "group_size": 4, "max_turns": 8}
    settings |= {"temperature": 0.7, "seq_len": 4096, "max_tokens": 128, "lora_rank": 8}
    written = document(**settings)
    for name, value in settings.items():
        assert at(written, LARGE.get(name).path) == value
    assert written["ckpt"]["interval"] == 30
    assert written["model"]["name"] == "Qwen/Qwen3-0.6B"


def test_keys_of_other_choices_are_left_out():
    written = document(optimizer="sgd", lora_rank=0)
    assert set(written["trainer"]["optim"]) == {
        "type",
        "lr",
        "weight_decay",
        "max_norm",
        "momentum",
    }
    assert "model" not in written["trainer"]
    assert written["trainer"]["scheduler"] == {"type": "constant"}
    assert "ipo_threshold" not in written["trainer"]["loss"]
    assert "length_penalty" not in written["orchestrator"]["algo"]


def test_thinking_is_always_said_for_a_model_that_thinks_by_default():
    assert document()["orchestrator"]["renderer"] == {"name": "qwen3", "enable_thinking": False}
    assert document("smollm2-135m")["orchestrator"]["renderer"] == {"name": "default"}


def test_what_a_job_may_not_set_is_ours():
    written = document(env={"num_rows": 64})
    source = written["orchestrator"]["train"]["source"][0]
    assert source["env"]["taskset"] == {"id": "environment", "num_rows": 64}
    assert source["env"]["agent"]["harness"] == {"id": "null"}
    assert source["env"]["agent"]["runtime"] == {"type": "subprocess"}
    assert written["weight_broadcast"] == {"type": "filesystem"}
    assert written["run"] == {"name": "job-1"}


def test_a_small_job_can_be_rendered_for_a_large_model():
    manifest = JobManifest.build("micro", lr=1e-3, bounds=SMALL)
    written = rl_document(manifest, "Qwen/Qwen3-1.7B", RUN)
    assert written["model"]["name"] == "Qwen/Qwen3-1.7B"
    assert written["orchestrator"]["renderer"]["enable_thinking"] is False


@pytest.mark.parametrize("run", [RlRun(name="../x"), RlRun(name="a", package="os; x")])
def test_names_that_leave_the_folder_are_refused(run):
    with pytest.raises(ConfigError, match="cannot be used"):
        rl_document(JobManifest.build("micro"), "qwen3-0.6b", run)


@pytest.mark.parity
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-1.7b", "smollm2-135m", "gemma3-270m"])
def test_prime_rls_own_classes_accept_it(settings, model, monkeypatch, tmp_path):
    """Needs the package prime-rl-configs; it imports the job's package to check its arguments."""
    classes = pytest.importorskip("prime_rl.configs.rl")
    (tmp_path / "tools").mkdir()
    for name, data in public_files("ledger").items():
        (tmp_path / "tools" / name).write_bytes(data)
    template_job("ledger").write(tmp_path / "job")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "job"))
    classes.RLConfig.model_validate(document(model, **settings))
