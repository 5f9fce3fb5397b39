"""The Tinker learner on a real Tinker-compatible server: SkyRL 0.3.0, SDK 0.24.1, CPU.

`tools/skyrl_check.py` sets the server up and runs this file. Its sampler keeps one set of weights per
training run, so an older policy is never sampled here after a newer one was published.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed here")

from safetensors.torch import load
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from nestling.core.errors import StoreError
from nestling.engine.checkpoint import load_model
from nestling.engine.model import forward, logits
from nestling.engine.params import bind
from nestling.engine.weights import parts, split_views
from nestling.outer.config import TinkerConfig
from nestling.outer.learner import LossSpec, TrainRow
from nestling.outer.learners import tinker_loss
from nestling.outer.learners.tinker_open import open_tinker, preflight
from nestling.outer.store_log import step_reports
from nestling.store.run_store import RunStore

URL = os.environ.get("NESTLING_SKYRL_URL", "")
MODEL = os.environ.get("NESTLING_SKYRL_MODEL", "none")
CHECKPOINTS = Path(os.environ.get("NESTLING_SKYRL_CHECKPOINTS", "none"))
CONFIG = TinkerConfig(
    base_model=MODEL, base_url=URL, sample_timeout_s=1_800, train_timeout_s=1_800, lora_rank=8
)
RANK, ALPHA = 8, 32.0  # what the server makes of a rank
LOGPROB_GAP = 1e-4
"""Largest distance of two float32 implementations on this model, on 4 turns of up to 48 tokens."""

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not URL, reason="no server; run tools/skyrl_check.py"),
    pytest.mark.filterwarnings("ignore"),  # the SDK and the cookbook warn of each other
]


@pytest.fixture(scope="module")
def agent():
    return load_model(MODEL)


@pytest.fixture
def learner(tmp_path, agent):
    made = open_tinker(CONFIG, tmp_path, stop_ids=[agent.tokenizer.turn_end_id])
    yield made
    made.close()


def prompt(agent, text="family: ledger"):
    tokenizer = agent.tokenizer
    return [
        *tokenizer.encode_markup("<|im_start|>user\n"),
        *tokenizer.encode(text),
        *tokenizer.encode_markup("<|im_end|>\n<|im_start|>assistant\n"),
    ]


async def turns(learner, agent, count=4):
    handle = await learner.publish()
    ids, found = prompt(agent), []
    for seed in range(count):
        answer = await learner.sample(
            handle, ids, session=f"{seed}", seed=seed, max_tokens=48, temperature=1.0
        )
        found.append(
            TrainRow(
                ids=ids + answer.ids,
                sampled=[False] * len(ids) + [True] * len(answer.ids),
                logprobs=[0.0] * len(ids) + answer.logprobs,
                advantage=1.0 if seed % 2 else -0.5,
            )
        )
    return found


def adapter(path):
    """The tensors of saved sampler weights, by Hugging Face name, as (down, up)."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    archive = CHECKPOINTS / run / "sampler_weights" / f"{name.rpartition('/')[2]}.tar.gz"
    with tarfile.open(archive) as opened:
        member = next(one for one in opened if one.name.endswith("adapter_model.safetensors"))
        tensors = load(opened.extractfile(member).read())
    found = {}
    for key, tensor in tensors.items():
        module, _, which = key.removeprefix("base_model.model.").partition(".lora_")
        found.setdefault(module, {})[which[0]] = tensor.float()
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def merged(agent, pairs):
    """Our weights with the server's adapter added: flat [1, P]."""
    flat = agent.weights.flat.clone()
    views = split_views(agent.config, flat)
    for part in parts(agent.config):
        module = part.hf_name.removesuffix(".weight")
        if module in pairs:
            down, up = pairs[module]
            update = (up @ down) * (ALPHA / RANK)
            target = views[part.slot][0, part.start_row : part.start_row + part.shape[0]]
            target += update if update.shape == target.shape else update.T
    return flat


def logprobs(agent, flat, ids):
    params = bind(agent.config, split_views(agent.config, flat))
    hidden = forward(params, agent.config, torch.tensor([[ids[:-1]]]))
    rows = torch.log_softmax(logits(params, hidden.view(1, -1, hidden.shape[-1]))[0].float(), -1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def largest_gap(agent, flat, rows):
    gap = 0.0
    for row in rows:
        with torch.no_grad():
            ours = logprobs(agent, flat, row.ids).numpy()
        mask = np.array(row.sampled[1:])
        gap = max(gap, float(np.abs(ours[mask] - np.array(row.logprobs[1:])[mask]).max()))
    return gap


async def test_preflight_finds_the_model():
    found = {
        one.name: one.state
        for one in await preflight(CONFIG, max_total_tokens=2048, temperature=1.0)
    }
    assert found["model"] == found["service"] == found["key"] == "ok"
    missing = CONFIG.model_copy(update={"base_model": "Qwen/Nothing"})
    problems = await preflight(missing, max_total_tokens=2048, temperature=1.0)
    assert [one.name for one in problems if one.state == "problem"] == ["model"]


async def test_logprobs_are_the_engines_before_and_after_updates(learner, agent, tmp_path):
    rows = await turns(learner, agent)
    before = largest_gap(agent, agent.weights.flat, rows)
    stats = await learner.forward_backward(rows, LossSpec())
    assert stats.max_logprob_gap < LOGPROB_GAP
    await learner.optim_step(2e-3)
    await learner.save("one")
    path = (await learner.publish()).path
    flat = merged(agent, adapter(path))
    assert float((flat - agent.weights.flat).abs().max()) > 1e-4
    after = largest_gap(agent, flat, await turns(learner, agent))
    print(f"largest distance of log-probabilities: base {before:.1e}, adapter {after:.1e}")
    assert before < LOGPROB_GAP
    assert after < LOGPROB_GAP
    # Another process resumes it: same weights, same optimiser, same next step.
    again = open_tinker(CONFIG, tmp_path, stop_ids=[agent.tokenizer.turn_end_id])
    await again.load("one")
    for one in (learner, again):
        await one.forward_backward(rows, LossSpec())
        await one.optim_step(2e-3)
    paths = [(await one.publish()).path for one in (learner, again)]
    mine, theirs = (merged(agent, adapter(one)) for one in paths)
    assert torch.allclose(mine, theirs, atol=1e-6)
    again.close()


async def test_one_step_matches_the_cookbooks_data_path(learner, agent):
    rows = await turns(learner, agent)
    start = len(prompt(agent))
    done = TrajectoryGroup(
        [
            Trajectory(
                [
                    Transition(
                        ob=types.ModelInput.from_ints(row.ids[:start]),
                        ac=TokensWithLogprobs(row.ids[start:], row.logprobs[start:]),
                        reward=row.advantage,
                        episode_done=True,
                    )
                ],
                types.ModelInput.empty(),
            )
            for row in rows
        ],
        [0.0] * len(rows),
        [{}] * len(rows),
    )
    advantages = compute_advantages([done])
    theirs, _ = assemble_training_data([done], advantages)
    theirs = [
        types.Datum(
            model_input=one.model_input,
            loss_fn_inputs={k: v for k, v in one.loss_fn_inputs.items() if k != "mask"},
        )
        for one in theirs
    ]
    centred = [
        TrainRow(ids=row.ids, sampled=row.sampled, logprobs=row.logprobs, advantage=float(adv))
        for row, adv in zip(rows, advantages[0], strict=True)
    ]
    service = learner._service
    ours = [service.datum(tinker_loss.datum(row)) for row in centred]
    losses, updates, first = [], [], None
    for data in (ours, theirs):
        client = service.create(MODEL, rank=RANK, seed=7).result(1_800)
        init = adapter(service.save_sampler(client, "init", 3_600).result(1_800))
        told = client.forward_backward(data, loss_fn="importance_sampling").result(timeout=1_800)
        losses.append(sum(np.sum(one["elementwise_loss"].data) for one in told.loss_fn_outputs))
        # An epsilon far above every gradient makes Adam's first step the gradient's direction.
        adam = types.AdamParams(learning_rate=1e4, beta1=0.9, beta2=0.95, eps=1e6)
        client.optim_step(adam).result(timeout=1_800)
        moved = adapter(service.save_sampler(client, "moved", 3_600).result(1_800))
        updates.append({name: moved[name][1] - init[name][1] for name in init})
        first = first or init
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert _cosine(*updates) > 0.9999

    # The same step by our engine, carried to the adapter: dL/dB = scale * dL/dW @ A^T. SkyRL trains on
    # the mean over a sequence's predicted tokens where the hosted service documents the sum.
    flat = agent.weights.flat.clone().requires_grad_()
    loss, trained = 0.0, torch.zeros(())
    for row in centred:
        mask = torch.tensor(row.sampled[1:])
        ratio = (logprobs(agent, flat, row.ids) - torch.tensor(row.logprobs[1:])).exp()
        row_loss = -(ratio * row.advantage)[mask].sum()
        loss += float(row_loss.detach())
        trained = trained + row_loss / len(mask)
    trained.backward()
    assert loss == pytest.approx(losses[0], rel=1e-3, abs=1e-3)
    grads = split_views(agent.config, flat.grad)
    engine = {}
    for part in parts(agent.config):
        module = part.hf_name.removesuffix(".weight")
        if module in first and "embed" not in module:
            grad = grads[part.slot][0, part.start_row : part.start_row + part.shape[0]]
            engine[module] = -(grad @ first[module][0].T)
    cosine = _cosine({name: updates[0][name] for name in engine}, engine)
    print(f"loss {losses[0]:.5f}; cosine of the gradients, server and engine: {cosine:.6f}")
    assert cosine > 0.999


def _cosine(one, two):
    left = torch.cat([one[name].flatten() for name in sorted(one)])
    right = torch.cat([two[name].flatten() for name in sorted(one)])
    return float(torch.dot(left, right) / left.norm() / right.norm())


RECIPE = f"""
name = "skyrl"
[agent]
model = "hatchling"
max_turns = 8
[learner]
kind = "tinker"
base_model = "{MODEL}"
base_url = "{URL}"
sample_timeout_s = 1800
train_timeout_s = 1800
[families]
training = ["ledger"]
held_out = []
[outer]
steps = 3
group_size = 2
max_staleness = 0
temperature = 1.0
max_turn_tokens = 128
max_total_tokens = 1024
kl_coef = 0.0
learning_rate = 2e-3
warmup_updates = 0
held_out = {{ every_steps = 0 }}
[inner]
eval_items = 8
leak_items = 0
[references]
arms = []
training_families = false
[fleet]
workers = 1
"""


def test_nested_run_is_killed_and_goes_on(tmp_path):
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "nestling", "run", str(recipe), "--out", str(run)]
    first = subprocess.Popen(command, start_new_session=True)
    try:
        # Into the second step: an episode of it has said something.
        while not _ask(run, lambda store: len(store.episodes.turns("train/000001/000")) > 0, False):
            assert first.poll() is None, "the run ended before it was killed"
            time.sleep(1)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    before = _ask(run, step_reports, [])
    assert len(before) == 1
    subprocess.run(command, check=True)
    reports = _ask(run, step_reports, [])
    assert [one.step for one in reports] == [1, 2, 3]
    assert reports[0] == before[0]
    assert [one.episodes for one in reports] == [2, 2, 2]
    assert reports[-1].version >= 1, "no group differed in reward: nothing was learnt"
    gaps = [one.update.max_logprob_gap for one in reports if one.update is not None]
    assert max(gaps) < LOGPROB_GAP, "episodes were trained with other weights than played them"
    assert len(_ask(run, lambda store: store.metrics.series("learner/sample_tokens"), [])) == 3
    print("steps", [(one.version, one.update and one.update.loss) for one in reports], "gaps", gaps)
    assert "tml-local" not in "".join(
        path.read_text("utf-8", "replace") for path in run.rglob("*") if path.is_file()
    )


def _ask(run, question, otherwise):
    """The answer of a run that may not have begun yet."""
    try:
        with RunStore.open_reader(run / "run.db") as store:
            return question(store)
    except StoreError:
        return otherwise


def test_cookbooks_own_loop_trains_on_nested_episodes(tmp_path):
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("steps = 3", "steps = 1"))
    command = [sys.executable, "-m", "nestling", "cookbook", str(recipe), "--out", str(run)]
    subprocess.run(command, check=True)
    lines = (run / "cookbook" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    rewards = [one["env/all/reward/total"] for one in told if "env/all/reward/total" in one]
    assert len(rewards) == 1
    assert -0.1 <= rewards[0] <= 1.0
    assert any(key.startswith("env/all/outcome/") for one in told for key in one)
    saved = (run / "cookbook" / "checkpoints.jsonl").read_text()
    assert "tinker://" in saved
