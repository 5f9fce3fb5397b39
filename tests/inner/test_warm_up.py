"""Supervised steps before the training itself, and base models by recipe."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError, JobFailedError
from nestling.engine.chat import render_call
from nestling.engine.tokenizer import Tokenizer
from nestling.families.vocabulary import tokenizer as shipped_tokenizer
from nestling.inner.models_config import ExtraModel, ModelsConfig, bounds_of, offered_bases
from nestling.inner.run import InnerContext, run_job
from nestling.inner.trainer import TrainRequest
from nestling.inner.warm_up import DEV_EXAMPLES, worked_examples
from nestling.jobs.bounds import OPEN, SMALL
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail
from nestling.jobs.probe import ProbeOptions, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutStart, Row

from .conftest import FAMILY, INIT

BOUNDS = replace(OPEN, base_models=("nano", "micro"))
CALL = '(a)<tool_call>\n{"name": "calc", "arguments": {"expression": "17+5"}}\n</tool_call>'

TASKSET = """\
import random

import verifiers.v1 as vf
from tools import Data, State, Tools, sample


class Worked(Data):
    turns: list[str] = []


class Task(vf.Task[Worked, State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def short(self, trace):
        return 1.0 - min(len(trace.last_reply), 120) / 120


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        rng = random.Random(0)
        for n in range(64):
            data = sample(rng, 1, 2).model_dump()
            turns = {turns} if n % 2 else []
            yield Task(Worked(**(data | {{"turns": turns}})), self.config.task)
"""


def job(sft: str, turns: list[str] | None = None) -> Bundle:
    table = (
        "lr = 1e-3\nmax_steps = 1\nbatch_size = 16\nmax_tokens = 16\nseq_len = 256\nlora_rank = 0\n"
    )
    said = repr(turns or [CALL, "ANSWER: 22"])
    return Bundle.from_files(
        {
            "job.toml": f'base_model = "micro"\n[prime_rl]\n{table}[sft]\n{sft}'.encode(),
            "environment/__init__.py": INIT.encode(),
            "environment/taskset.py": TASKSET.format(turns=said).encode(),
        }
    )


def run(make_context: Callable[..., InnerContext], bundle: Bundle):
    return run_job(bundle, FAMILY, make_context(bounds=BOUNDS), lambda step: None)


@pytest.mark.long
@pytest.mark.parametrize("source", ["dev", "rows"])
def test_a_warm_up_teaches_the_form_before_the_training(
    make_context: Callable[..., InnerContext], source: str
) -> None:
    bundle = job(f'source = "{source}"\nsteps = 12\nrows = 8\nlr = 1e-3\n')
    outcome = run(make_context, bundle)
    assert (outcome.status, outcome.reason) == ("succeeded", "")
    warmed = outcome.warm_up
    assert warmed is not None
    assert warmed.steps == 12
    assert warmed.examples == (DEV_EXAMPLES if source == "dev" else 32)
    assert warmed.last_loss < 0.8 * warmed.first_loss
    assert outcome.cpu_s > warmed.cpu_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (["no call", "ANSWER: 1"], "no tool call"),
        ([CALL, CALL], "expected the answer"),
        (["x"] * 40, "32 texts"),
        ([CALL] * 30 + ["ANSWER: 1"], "seq_len"),
    ],
    ids=["text", "no answer", "too many", "too long"],
)
def test_turns_that_cannot_be_worked_fail_the_job_with_a_reason(
    make_context: Callable[..., InnerContext], turns: list[str], words: str
) -> None:
    outcome = run(make_context, job('source = "rows"\nsteps = 1\n', turns))
    assert outcome.status == "failed"
    assert outcome.reason.startswith("sft.")
    assert words in outcome.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [("if False", "no row has turns"), ("* 40 if True", "32 texts")],
    ids=["none", "too many"],
)
def test_the_probe_finds_what_a_warm_up_would_miss(
    jail: Jail, zygote: Zygote, change: str, words: str
) -> None:
    files = dict(job('source = "rows"\n').files)
    taskset = files["environment/taskset.py"].decode().replace("if n % 2", change)
    bundle = Bundle.from_files(files | {"environment/taskset.py": taskset.encode()})
    opener = JailedOpener(jail=jail, starter=zygote)
    report = probe(bundle, FAMILY, env_opener=opener, options=ProbeOptions(bounds=BOUNDS))
    assert [problem.code for problem in report.problems] == ["rows.turns"]
    assert words in report.problems[0].wrong


class TwoRowEnv:
    """Rows in memory: the second is a worked example. Tools answer with how often they were asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.scored = 0

    def rows(self, limit: int) -> list[Row]:
        datas = (
            '{"answer": "1"}',
            '{"turns": ["<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}</tool_call>", "ANSWER: 1"]}',
        )
        return [
            Row(index=index, system_prompt="tools: calc", prompt="start with 17.", data_json=data)
            for index, data in enumerate(datas)
        ][:limit]

    def tool_schemas(self) -> list[dict[str, object]]:
        return []

    def reset(self, rows: list[int]) -> list[RolloutStart]:
        return [
            RolloutStart(rollout_id=7 + row, system_prompt="tools: calc", prompt="start with 17.")
            for row in rows
        ]

    def step(self, calls: list[CallRequest]) -> list[str | None]:
        self.asked += len(calls)
        return [f"{self.asked}9" for _ in calls]

    def score(self, finals: list[FinalRequest]) -> list[object]:
        self.scored += len(finals)
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_only_the_models_own_turns_are_learned(tmp_path: Path) -> None:
    bundle = job('source = "rows"\n')
    manifest = bundle.manifest(BOUNDS)
    request = TrainRequest(
        bundle=bundle, manifest=manifest, family=FAMILY, base_folder=tmp_path,
        out_folder=tmp_path, seed=0,
    )  # fmt: skip
    words, env = shipped_tokenizer(), TwoRowEnv()
    (row,) = worked_examples(request, manifest.sft, words, env)
    assert (env.asked, env.scored) == (1, 1)
    learned = words.decode([i for i, w in zip(row.ids, row.ce_weights, strict=True) if w])
    assert learned == (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>ANSWER: 1<|im_end|>'
    )
    assert "<tool_response>\n19\n</tool_response>" in words.decode(row.ids)
    assert not any(row.sampled)


class WorkedRowsEnv(TwoRowEnv):
    """Every row is a worked example, the third with one call less; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[CallRequest]] = []
        self.finals: list[FinalRequest] = []

    def rows(self, limit: int) -> list[Row]:
        calls = [render_call("f", {"n": 1}), render_call("f", {"n": 22})]
        return [
            Row(
                index=index,
                system_prompt="tools: calc",
                prompt="start with 17.",
                data_json=json.dumps({"turns": [*calls[index // 2 :], "ANSWER: 1"]}),
            )
            for index in range(min(limit, 3))
        ]

    def step(self, calls: list[CallRequest]) -> list[str | None]:
        self.steps.append(list(calls))
        return super().step(calls)

    def score(self, finals: list[FinalRequest]) -> list[object]:
        self.finals += finals
        return super().score(finals)


def test_worked_rows_are_played_side_by_side_with_the_token_counts_of_a_model(
    tmp_path: Path,
) -> None:
    bundle = job('source = "rows"\n')
    manifest = bundle.manifest(BOUNDS)
    request = TrainRequest(
        bundle=bundle, manifest=manifest, family=FAMILY, base_folder=tmp_path,
        out_folder=tmp_path, seed=0,
    )  # fmt: skip
    env = WorkedRowsEnv()
    rows = worked_examples(request, manifest.sft, shipped_tokenizer(), env)
    assert [len(calls) for calls in env.steps] == [3, 2]
    assert len(env.finals) == 3
    for row, final in zip(rows, env.finals, strict=True):
        calls = [
            call for calls in env.steps for call in calls if call.rollout_id == final.rollout_id
        ]
        requests = [*calls, final]
        ends = [
            i + 1
            for i, w in enumerate(row.ce_weights)
            if w and not any(row.ce_weights[i + 1 : i + 2])
        ]
        assert [one.prompt_tokens + one.completion_tokens for one in requests] == ends
        assert sum(one.completion_tokens for one in requests) == sum(row.ce_weights)


def test_dev_examples_end_in_the_right_answer_and_are_public(tmp_path: Path) -> None:
    bundle = job("")
    manifest = bundle.manifest(BOUNDS)
    request = TrainRequest(
        bundle=bundle, manifest=manifest, family=FAMILY, base_folder=tmp_path,
        out_folder=tmp_path, seed=0,
    )  # fmt: skip
    words = shipped_tokenizer()
    from nestling.families.splits import dev_items

    rows = worked_examples(request, manifest.sft, words, TwoRowEnv())
    for row, item in zip(rows, dev_items(FAMILY, DEV_EXAMPLES), strict=True):
        text = words.decode(row.ids)
        assert item.prompt in text
        assert text.endswith(f"ANSWER: {item.answer}<|im_end|>")


def test_no_worked_rows_are_named(tmp_path: Path) -> None:
    env = TwoRowEnv()
    env.rows = lambda limit: TwoRowEnv.rows(env, 1)  # type: ignore[method-assign]
    bundle = job('source = "rows"\n')
    manifest = bundle.manifest(BOUNDS)
    request = TrainRequest(
        bundle=bundle, manifest=manifest, family=FAMILY, base_folder=tmp_path,
        out_folder=tmp_path, seed=0,
    )  # fmt: skip
    with pytest.raises(JobFailedError, match=r"sft\.no_examples"):
        worked_examples(request, manifest.sft, shipped_tokenizer(), env)


def test_the_recipe_decides_which_bases_there_are(bases: dict[str, Path], tmp_path: Path) -> None:
    assert bounds_of(ModelsConfig()) is SMALL
    assert set(offered_bases(ModelsConfig(), tmp_path)) == {"nano", "micro"}
    extra = ExtraModel(name="mine", folder=str(bases["micro"]))
    both = ModelsConfig(extra=(extra,))
    alone = ModelsConfig(shipped=False, extra=(extra,))
    assert bounds_of(both).base_models == ("nano", "micro", "mine")
    assert bounds_of(alone).base_models == ("mine",)
    assert bounds_of(alone).sft == OPEN.sft
    ((name, base),) = offered_bases(alone, tmp_path).items()
    assert (name, base.folder) == ("mine", bases["micro"].resolve())
    assert base.params > 0
    again = offered_bases(alone, tmp_path)["mine"]
    assert again.sha256 == base.sha256
    other = ModelsConfig(shipped=False, extra=(ExtraModel(name="mine", folder=str(bases["nano"])),))
    assert offered_bases(other, tmp_path)["mine"].sha256 != base.sha256


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"name": "nano", "folder": "/"}, "choose another name"),
        ({"name": "smollm2-135m"}, "nestling models fetch smollm2-135m"),
        ({"name": "mine"}, "give its folder"),
        ({"name": "mine", "folder": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_a_base_that_is_not_there_says_what_to_do(
    extra: dict[str, str], words: str, tmp_path: Path
) -> None:
    config = ModelsConfig(extra=(ExtraModel(**extra),))
    with pytest.raises(ConfigError, match=words):
        offered_bases(config, tmp_path)


def test_a_base_with_shards_and_a_second_output_layer_is_scored(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from nestling.inner.pinned_base import PinnedBase

    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in bases["micro"].iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bases["micro"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    where = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    base = PinnedBase(folder)
    trained = base.load_trained(bases["micro"])
    assert base.delta_norm(trained) == 0.0
    assert isinstance(trained.tokenizer, Tokenizer)
