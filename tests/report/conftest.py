"""A real run store, written by the real outer loop, whose episodes follow a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

from nestling.agent.attempt import AttemptRecord, ManifestSummary
from nestling.agent.episode_result import EpisodeResult, TurnRecord
from nestling.agent.policy import Trajectory
from nestling.agent.reward import RewardWeights, compute_terms
from nestling.core.errors import Problem
from nestling.core.rundir import RunDir
from nestling.core.seeds import derive_seed
from nestling.fleet.handlers import pack_bundle
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.outer.config import HeldOutConfig, OuterConfig
from nestling.outer.heldout import UNTRAINED, Arm, sweep
from nestling.outer.learner import LossStats, Sampled, StepStats
from nestling.outer.loop import train
from nestling.outer.store_log import StoreLog
from nestling.report.run_info import COMMIT_KEY, MACHINE_KEY, VERSION_KEY
from nestling.store import GroupCommit, RunStore
from nestling.store.jobs import LeaseRecord, NewJob
from nestling.store.money import Reservation

FAMILIES = ("ledger", "dispatch")
BEST_PRE = {"ledger": 0.25, "dispatch": 0.4, "triage": 0.35}
HOSTILE = "<script>alert('x')</script>\"'><img src=https://evil.example/x onerror=1>\u202e\x00 & {{ 7 * 7 }}"


class StepClock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.at = 1_900_000_000.0

    def now(self) -> float:
        self.at += 1.0
        return self.at

    def monotonic(self) -> float:
        return self.now()


@dataclass(frozen=True)
class Version:
    version: int


class CountingLearner:
    """Has no weights to speak of: only counts its updates, and reports made-up-free numbers."""

    def __init__(self) -> None:
        self.version = 0

    async def sample(self, handle, ids, *, session, seed, max_tokens, temperature):
        return Sampled(ids=[1], logprobs=[-0.5], stopped=True)

    async def forward_backward(self, rows, loss) -> LossStats:
        tokens = sum(sum(row.sampled) for row in rows)
        nll = -sum(sum(row.logprobs) for row in rows) / tokens
        return LossStats(loss=0.0, num_tokens=tokens, kl_initial=0.01 * self.version, nll=nll)

    async def optim_step(self, lr: float) -> StepStats:
        self.version += 1
        return StepStats(version=self.version, learning_rate=lr, grad_norm=0.1)

    async def publish(self) -> Version:
        return Version(self.version)

    async def save(self, name: str) -> str:
        return f"{name}@{self.version}"

    async def load(self, ref: str) -> None:
        self.version = int(ref.rpartition("@")[2])


def bundle_of(base: str, lr: float, text: str = "") -> Bundle:
    manifest = {"base_model": base, "prime_rl": {"lr": lr, "max_steps": 8}}
    return Bundle.from_files(
        {
            "job.toml": tomli_w.dumps(manifest).encode(),
            "environment/__init__.py": f"# rubric {text}\n".replace("\x00", "").encode(),
        }
    )


def episode(plan, skill: float, *, text: str = "", noop: bool = False) -> EpisodeResult:
    """Better skill: more often valid, better base, more uplift. Depends on the plan's seed."""
    rng = random.Random(derive_seed(plan.policy_seed, "script"))
    best = BEST_PRE[plan.family]
    luck = 0.0 if noop else rng.random()
    valid_attempt = 1 if luck < 0.4 + 0.1 * skill else 2 if luck < 0.7 + 0.1 * skill else None
    base = "micro" if noop or rng.random() < 0.4 + 0.1 * skill else "nano"
    lr = rng.choice([1e-4, 3e-4, 1e-3])
    bundle = bundle_of(base, lr, text)
    dies = not noop and rng.random() < 0.15
    gain = 0.0 if noop else rng.uniform(-0.1, 0.1 + 0.06 * skill)
    refused = Problem(
        stage="schema",
        code="schema.unknown_key",
        wrong=f"unknown key {text or 'lrr'}",
        expected="a [prime_rl] key",
        fix="write lr",
    )
    manifest = ManifestSummary(
        base_model=base,
        prime_rl={} if noop else {"lr": lr, "max_steps": 8},
        rollouts=512,
        batch_size=64,
    )
    num_attempts = valid_attempt or 3
    attempts = tuple(
        AttemptRecord(
            number=number,
            ok=number == valid_attempt,
            readable=True,
            problems=() if number == valid_attempt else (refused,),
            manifest=manifest if number == valid_attempt else None,
            job_hash=bundle.job_hash,
        )
        for number in range(1, num_attempts + 1)
    )
    outcome = None
    code = "attempts_used_up"
    if valid_attempt is not None:
        post = min(1.0, max(0.0, best + gain))
        outcome = Outcome(
            job_hash=bundle.job_hash,
            family=plan.family,
            base_model=base,
            status="failed" if dies else "succeeded",
            reason="env.crashed" if dies else "",
            detail=text if dies else "",
            pre=best if base == "micro" else best - 0.15,
            best_pre=best,
            post=None if dies else post,
            uplift=None if dies else post - best,
            uplift_ci=None if dies else (post - best - 0.05, post - best + 0.05),
            n=0 if dies else 200,
            train_steps=8,
            steps=tuple(
                StepRecord(
                    step=step,
                    reward_mean=0.3 + 0.05 * step,
                    reward_std=0.2,
                    loss=0.1,
                    grad_norm=0.5,
                    kl=0.01,
                    learning_rate=lr,
                    trained_groups=6,
                    rollout_tokens=4000,
                    cpu_s=1.0,
                )
                for step in range(1, 9)
            ),
            base_hash="a",
            final_hash="a" if noop else "b",
            cpu_s=9.0,
            wall_s=10.0,
            usd=0.001,
        )
        code = "job_failed" if dies else "job_succeeded"
    terms = compute_terms(
        outcome,
        valid_attempt=valid_attempt,
        submitted=True,
        budget_share=0.0 if noop else 0.5,
        weights=RewardWeights(),
    )
    turns = (
        TurnRecord(role="system", text="You write training jobs."),
        TurnRecord(role="user", text=f"Teach {plan.family}."),
        TurnRecord(
            role="assistant",
            text=f"I write the job. {text}",
            tool="write_file",
            result=f"ok {text}",
            tokens=3,
        ),
        TurnRecord(role="assistant", text="submit", tool="submit_job", result="accepted", tokens=1),
    )
    return EpisodeResult(
        family=plan.family,
        task_id=plan.episode_id,
        task_seed=plan.task_seed,
        policy_seed=plan.policy_seed,
        reward_kind="seed",
        reward=terms["seed"].total,
        terms=terms,
        outcome_code=code,
        detail=outcome.reason if outcome else "",
        attempts=attempts,
        valid_attempt=valid_attempt,
        manifest=manifest if valid_attempt else None,
        outcome=outcome,
        turns=turns,
        num_turns=2,
        sampled_tokens=4,
        total_tokens=9,
        trajectory=Trajectory(
            ids=(1, 2, 3, 4),
            sampled=(False, True, True, True),
            logprobs=(0.0, -0.5, -0.25, -0.75),
            prompt_len=1,
            temperature=0.7,
        ),
        seconds=12.0,
    )


class ScriptedPlayer:
    def __init__(self, text: str = "") -> None:
        self.text = text

    async def play(self, plan, handle) -> EpisodeResult:
        await asyncio.sleep(0)
        return episode(plan, handle.version, text=self.text)


async def play_run(
    folder: Path, *, steps: int, planned: int, text: str, measured: bool, groups: int = 4
) -> None:
    held_out = HeldOutConfig(every_steps=0, episodes=12, resamples=200)
    config = OuterConfig(
        seed=7,
        steps=steps,
        groups_per_step=groups,
        group_size=4,
        max_staleness=0,
        held_out=held_out,
    )
    run = RunDir.create(folder)
    plan = {"outer": {"steps": planned, "seed": 7, "group_size": 4}, "inner": {"seed": 11}}
    run.config.write_text(tomli_w.dumps({**plan, "note": text[:20].replace("\x00", "")}))
    clock = StepClock()
    with RunStore(run.database, clock=clock) as store, GroupCommit(store) as writer:
        store.set_meta(VERSION_KEY, "0.1.0")
        store.set_meta(COMMIT_KEY, "0123456789abcdef0123")
        store.set_meta(MACHINE_KEY, "2 cores, 8 GB")
        log = StoreLog(writer)
        await train(
            config,
            learner=CountingLearner(),
            player=ScriptedPlayer(text),
            log=log,
            families=FAMILIES,
            clock=clock,
        )
        if measured:
            await _measure(config, log, steps)
        _fleet(run, store)


async def _measure(config: OuterConfig, log: StoreLog, steps: int) -> None:
    def arm(name: str, skill: float, *, step: int = 0, noop: bool = False) -> Arm:
        async def play(plan) -> EpisodeResult:
            return episode(plan, skill, noop=noop)

        return Arm(name=name, play=play, step=step, version=step)

    references = [arm("noop", 0, noop=True), arm("random", -2), arm("template", 3)]
    for step in (0, steps):
        arms = [*references, arm(UNTRAINED, 0)]
        if step:
            arms.append(arm(f"step-{step:06d}", step, step=step))
        found = await sweep(
            arms,
            [*FAMILIES, "triage"],
            config=config.held_out,
            seed=6,
            log=log,
            against=[UNTRAINED, "noop"],
        )
        await log.sweep_done(step, found)


async def measure_only(folder: Path) -> None:
    """Two policies on one family, compared with each other."""

    def arm(name: str, skill: float, *, noop: bool = False) -> Arm:
        async def play(plan) -> EpisodeResult:
            return episode(plan, skill, noop=noop)

        return Arm(name=name, play=play)

    run = RunDir.create(folder)
    config = HeldOutConfig(every_steps=0, episodes=6, resamples=200)
    with RunStore(run.database, clock=StepClock()) as store, GroupCommit(store) as writer:
        log = StoreLog(writer)
        arms = [arm("noop", 0, noop=True), arm("template", 3)]
        found = await sweep(arms, ["ledger"], config=config, seed=6, log=log, against=["noop"])
        await log.sweep_done(0, found)


def _fleet(run: RunDir, store: RunStore) -> None:
    """Two queued jobs as a fleet would leave them: one done, one waiting."""
    for record in store.episodes.all(state="finished"):
        result = EpisodeResult.model_validate(record.summary["result"])
        if result.outcome is None or result.outcome.status != "succeeded":
            continue
        base, lr = result.manifest.base_model, result.manifest.prime_rl.get("lr", 3e-4)
        text = HOSTILE if HOSTILE in result.turns[2].text else ""
        bundle = bundle_of(base, lr, text)
        job_id = f"run-{result.outcome.job_hash[:8]}-{record.family}"
        if store.jobs.exists(job_id):
            continue
        payload = {"family": record.family, "job_hash": bundle.job_hash}
        payload["bundle"] = pack_bundle(run.artifacts, bundle)
        store.jobs.insert(NewJob(id=job_id, kind="run", payload=payload, family=record.family))
        lease = LeaseRecord(
            job_id=job_id,
            token=job_id,
            worker="w0",
            session="s",
            acquired_at=0.0,
            heartbeat_at=0.0,
            acquired_mono_s=0.0,
            expires_mono_s=1.0,
            stage=None,
        )
        store.jobs.start(store.jobs.get(job_id), lease)
        store.jobs.finish(store.jobs.get(job_id), result.outcome.model_dump(mode="json"))
        money = Reservation(
            id=job_id, microusd=5_000, machine="cpu-core", day="2030-01-01", job_id=job_id
        )
        store.money.reserve(money, {})
        store.money.settle(job_id, 1_000, 30.0)
    if not store.jobs.exists("run-waiting"):
        store.jobs.insert(NewJob(id="run-waiting", kind="run", payload={}, family="ledger"))


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    def make(folder: Path, *, steps: int = 4, text: str = "", **more) -> Path:
        settings = {"planned": steps, "measured": True} | more
        asyncio.run(play_run(folder, steps=steps, text=text, **settings))
        return folder

    return make


@pytest.fixture(scope="session")
def run_folder(make_run, tmp_path_factory) -> Path:
    """Four steps of four groups of four episodes, sweeps, a fleet; never written to by tests."""
    return make_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE
