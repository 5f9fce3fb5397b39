"""Our episodes driven by tinker-cookbook's own rollouts; needs an environment that has it.

`tools/cookbook_check.py` makes one for each supported version and runs this file there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect

import numpy as np
import pytest

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed here")

import torch
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import TokenPolicy
from nestling.engine.learn import AdamW, ImportanceSampling, PolicyTrainer
from nestling.engine.learn import TrainRow as EngineRow
from nestling.engine.model import forward, logits
from nestling.engine.params import bind
from nestling.engine.weights import split_views
from nestling.outer.bridge.cookbook import EpisodeDataset, EpisodeEnv, EpisodeGroup, dataset_builder
from nestling.outer.bridge.episodes import FAULT_REWARD, EpisodePay
from nestling.outer.config import OuterConfig
from nestling.outer.learner import LossSpec, TrainRow
from nestling.outer.learners import tinker_loss
from nestling.outer.learners.tinker_service import TinkerService
from nestling.outer.plan import plan_group

from .conftest import TOKENIZER, tiny_model

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore"),  # the cookbook's dependencies warn of each other
]

CONFIG = OuterConfig(
    steps=2, groups_per_step=2, group_size=3, max_turn_tokens=8, max_total_tokens=200, temperature=1
)
PROMPT = AgentPrompt(system="s", user="ann", tool_schemas=(), style="compact", family="ledger")


class Say(TokenCompleter):
    """A policy that says one of a few things, slowly if asked, and may break."""

    def __init__(self, break_at=None):
        self.calls, self.break_at = 0, break_at

    async def __call__(self, model_input, stop, *, max_tokens=None):
        self.calls += 1
        if self.calls == self.break_at:
            raise RuntimeError("sampler down")
        await asyncio.sleep(0)
        ids = [*TOKENIZER.encode("bob" * (self.calls % 3)), TOKENIZER.turn_end_id]
        logprobs = [-0.1 * (place + 1) for place in range(len(ids))]
        return TokensWithLogprobs(ids, logprobs, "stop")


class Episodes:
    """Episodes of a few turns over our token sessions; counts those that are alive."""

    def __init__(self, **changes):
        self.changes, self.alive, self.closed, self.reached = changes, 0, 0, asyncio.Event()

    def __call__(self, plan):
        change = self.changes.get(f"m{plan.member}", {})

        async def play(sampler):
            self.alive += 1
            try:
                return await self._turns(sampler, **change)
            finally:
                await asyncio.sleep(0)
                self.alive -= 1
                self.closed += 1

        return play

    async def _turns(self, sampler, *, turns=2, fail=None, hang=None, twice=False):
        policy = TokenPolicy(tokenizer=TOKENIZER, sampler=sampler, max_total_tokens=200)
        session = policy.begin(PROMPT, 1)
        if twice:
            async with asyncio.TaskGroup() as group:
                group.create_task(policy.begin(PROMPT, 2).act())
                group.create_task(session.act())
        for number in range(turns):
            if fail == number:
                raise ValueError("harness bug")
            if hang == number:
                self.reached.set()
                await asyncio.Event().wait()
            await session.act()
            await session.observe(f"{number}")
        return EpisodePay(reward=0.25 * turns, metrics={"turns": float(turns)})


def group(episodes, timeout_s=30.0):
    return EpisodeGroup(
        plan_group(CONFIG, ["ledger"], 0),
        episodes,
        stop_ids=[TOKENIZER.turn_end_id],
        timeout_s=timeout_s,
    )


@pytest.fixture
async def check():
    """Every case ends with no episode alive and no task left."""
    made = []

    def make(**changes):
        made.append(Episodes(**changes))
        return made[-1]

    yield make
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not {task.get_name() for task in left if task.get_name().startswith("episode")}
    assert all(one.alive == 0 for one in made)
    for task in left:
        assert "wanted" not in str(task)


async def rewards(episodes, policy=None, **options):
    done = await do_group_rollout(group(episodes, **options), policy or Say())
    return done.get_total_rewards()


async def test_episodes_of_different_length(check):
    episodes = check(m0={"turns": 2}, m1={"turns": 3}, m2={"turns": 1})
    assert await rewards(episodes) == [0.5, 0.75, 0.25]
    assert episodes.closed == 3


async def test_error_in_an_episode_costs_itself_alone(check):
    episodes = check(m1={"fail": 1})
    assert await rewards(episodes) == [0.5, FAULT_REWARD, 0.5]


async def test_error_before_the_first_turn(check):
    assert await rewards(check(m1={"fail": 0}, m2={"turns": 0})) == [0.5, FAULT_REWARD, 0.0]


async def test_episode_that_takes_too_long(check):
    episodes = check(m1={"hang": 1})
    assert await rewards(episodes, timeout_s=0.3) == [0.5, FAULT_REWARD, 0.5]


async def test_broken_sampler_ends_the_group_and_closes_all(check):
    episodes = check()
    with pytest.raises(RuntimeError, match="sampler down"):
        await rewards(episodes, Say(break_at=3))
    assert episodes.closed == 3


async def test_retry_plays_fresh_episodes(check):
    episodes = check()
    done = await do_group_rollout(
        group(episodes), Say(break_at=2), strategy=RetryOnFailure(max_retries=2)
    )
    assert done.get_total_rewards() == [0.5, 0.5, 0.5]
    assert episodes.alive == 0


async def test_cancelled_from_outside(check):
    episodes = check(m0={"hang": 1}, m1={"hang": 1}, m2={"hang": 1})
    running = asyncio.ensure_future(rewards(episodes))
    await episodes.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert episodes.closed == 3


async def test_the_cookbooks_own_limit(check):
    episodes = check(m0={"hang": 1})
    plan = plan_group(CONFIG, ["ledger"], 0).episodes[0]
    env = EpisodeEnv(episodes(plan), name="x", stop_ids=[TOKENIZER.turn_end_id], timeout_s=None)
    done = await run_rollout(Say(), env, limits=RolloutLimits(rollout_timeout_seconds=0.3))
    await env.close()
    await env.close()
    assert done.stop_reason == "rollout_timeout"


async def test_two_turns_at_once_are_refused(check):
    assert (await rewards(check(m0={"twice": True})))[0] == FAULT_REWARD


@pytest.mark.parametrize(
    ("owner", "name", "args", "options"),
    [
        ("service", "create_lora_training_client", (), {"base_model": "m", "rank": 8, "seed": 0}),
        ("service", "create_training_client_from_state_with_optimizer", ("path",), {}),
        ("service", "create_sampling_client", (), {"model_path": "p", "base_model": None}),
        ("service", "create_rest_client", (), {}),
        ("training", "forward_backward", ([],), {"loss_fn": "ppo", "loss_fn_config": {}}),
        ("training", "optim_step", ("adam",), {}),
        ("training", "save_state", ("name",), {"ttl_seconds": 1}),
        ("training", "save_weights_for_sampler", ("name",), {"ttl_seconds": 1}),
        ("sampling", "sample", (), {"prompt": 0, "num_samples": 1, "sampling_params": 0}),
        ("sampling", "compute_logprobs", ("prompt",), {}),
        ("rest", "delete_checkpoint_from_tinker_path", ("path",), {}),
    ],
)
def test_every_call_of_the_adapter_fits_this_sdk(owner, name, args, options):
    module = importlib.import_module(f"tinker.lib.public_interfaces.{owner}_client")
    call = getattr(getattr(module, f"{owner.capitalize()}Client"), name)
    inspect.signature(call).bind("self", *args, **options)


async def test_dataset_follows_our_plan(check):
    dataset = EpisodeDataset(CONFIG, ["ledger", "triage"], check(), stop_ids=[0])
    built, none = await dataset_builder(dataset)()
    assert built is dataset
    assert none is None
    assert len(built) == CONFIG.steps
    batches = [built.get_batch(index) for index in range(len(built))]
    names = [one._plan.group_id for batch in batches for one in batch]
    assert names == [plan_group(CONFIG, ["ledger", "triage"], n).group_id for n in range(4)]
    assert batches[0][1].logging_tags() == ["triage"]


async def trained_group(check):
    """One group as the cookbook trains on it, and as our loop does."""
    episodes = check(m0={"turns": 2}, m1={"turns": 3}, m2={"turns": 1})
    done = await do_group_rollout(group(episodes), Say())
    theirs, _ = assemble_training_data([done], compute_advantages([done]))
    total = done.get_total_rewards()
    rows = []
    for trajectory, reward in zip(done.trajectories_G, total, strict=True):
        ids, sampled, logprobs = [], [], []
        for step in trajectory.transitions:
            seen = step.ob.to_ints()
            assert seen[: len(ids)] == ids
            fresh = len(seen) - len(ids)
            ids = [*seen, *step.ac.tokens]
            sampled += [False] * fresh + [True] * len(step.ac.tokens)
            logprobs += [0.0] * fresh + list(step.ac.logprobs)
        advantage = reward - sum(total) / len(total)
        rows.append(TrainRow(ids=ids, sampled=sampled, logprobs=logprobs, advantage=advantage))
    return theirs, rows


async def test_our_rows_become_the_cookbooks_data(check):
    theirs, rows = await trained_group(check)
    assert len(theirs) == len(rows) == 3  # one datum an episode: the history only grew
    with contextlib.suppress(TypeError):
        service = TinkerService("tml-none", "http://127.0.0.1:9")
    for other, row in zip(theirs, rows, strict=True):
        ours = service.datum(tinker_loss.datum(row))
        assert ours.model_input.to_ints() == other.model_input.to_ints()
        for key in ("target_tokens", "logprobs", "advantages"):
            mine = np.asarray(ours.loss_fn_inputs[key].data)
            assert mine == pytest.approx(np.asarray(other.loss_fn_inputs[key].data), abs=1e-6), key
        assert set(ours.loss_fn_inputs) == set(other.loss_fn_inputs) - {"mask"}


async def test_one_step_has_the_loss_and_gradient_of_the_cookbooks_data(check):
    theirs, rows = await trained_group(check)
    model = tiny_model()
    flat = model.weights.flat.clone().requires_grad_()
    total, now = torch.zeros(()), []
    for one in theirs:
        inputs, fields = one.model_input.to_ints(), one.loss_fn_inputs
        hidden = forward(bind(model.config, split_views(model.config, flat)), model.config, torch.tensor([[inputs]]))  # fmt: skip
        table = torch.log_softmax(logits(bind(model.config, split_views(model.config, flat)), hidden.view(1, -1, hidden.shape[-1]))[0], -1)  # fmt: skip
        logp = table.gather(1, torch.tensor(fields["target_tokens"].data)[:, None])[:, 0]
        ratio = (logp - torch.tensor(fields["logprobs"].data)).exp()
        # The service's importance sampling: a sum over tokens, zero where nothing was sampled.
        total = total - (ratio * torch.tensor(fields["advantages"].data)).sum()
        now.append(logp.detach().numpy())
    total.backward()
    kept = [row for row in rows if row.advantage]
    told = [logp for logp, row in zip(now, rows, strict=True) if row.advantage]
    stats = tinker_loss.stats(kept, told, LossSpec())
    assert stats.loss * stats.num_tokens == pytest.approx(float(total), rel=1e-5, abs=1e-5)
    trainer = PolicyTrainer(model, ImportanceSampling(), AdamW(lr=0.0, max_norm=1e9))
    mine = trainer.forward_backward([EngineRow(ids=row.ids, sampled=row.sampled, logprobs=row.logprobs, advantage=row.advantage) for row in rows], 1.0)  # fmt: skip
    assert mine.loss == pytest.approx(stats.loss, rel=1e-4, abs=1e-5)
    ours, other = trainer._trained.grad.flatten(), flat.grad.flatten()
    cosine = float(torch.dot(ours, other) / ours.norm() / other.norm())
    assert cosine > 0.9999
