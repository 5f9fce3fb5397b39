from collections.abc import Callable
from dataclasses import replace

import pytest

from nestling.inner.noop import noop_outcome
from nestling.inner.run import InnerContext, run_job
from nestling.inner.spread import with_settings
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import StepRecord
from nestling.jobs.template import template_job

from .conftest import FAMILY, SAME, SHORT, N, job

MakeContext = Callable[..., InnerContext]


def ignore(step: StepRecord) -> None:
    """Steps are in the outcome as well."""


@pytest.mark.long
def test_job_learns_its_rubric_and_repeats_exactly(make_context: MakeContext) -> None:
    context = make_context()
    logged: list[StepRecord] = []
    learned = job(max_steps=12, batch_size=64, group_size=16)
    first = run_job(learned, FAMILY, context, logged.append)

    assert (first.status, first.reason) == ("succeeded", "")
    assert tuple(logged) == first.steps
    assert [step.step for step in first.steps] == list(range(12))
    rewards = [step.reward_mean for step in first.steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    assert max(abs(step.kl or 0.0) for step in first.steps) < 1e-3  # rollouts are on policy
    sampled = [step.step for step in first.steps if step.samples]
    assert sampled == [0, 11]
    for sample in (*first.steps[0].samples, *first.steps[-1].samples):
        assert "<|im_start|>assistant" in sample.text
    assert first.steps[0].samples[0].text != first.steps[0].samples[1].text
    assert first.n == N
    assert first.uplift == pytest.approx(first.post - first.best_pre)
    assert first.uplift_ci[0] <= first.uplift <= first.uplift_ci[1]
    assert first.delta_norm > 0
    assert first.final_hash != first.base_hash
    assert (context.work_folder / first.model_ref / "model.safetensors").is_file()
    assert first.cpu_s > sum(step.cpu_s for step in first.steps)
    assert first.usd == pytest.approx(first.cpu_s * 0.36 / 3600)

    second = run_job(learned, FAMILY, context, ignore)
    measured = {"cpu_s", "wall_s", "usd", "model_ref", "steps"}
    assert second.model_dump(exclude=measured) == first.model_dump(exclude=measured)
    for a, b in zip(first.steps, second.steps, strict=True):
        assert a.model_copy(update={"cpu_s": 0.0}) == b.model_copy(update={"cpu_s": 0.0})


def test_job_without_signal_changes_nothing_and_its_uplift_is_exactly_zero(
    make_context: MakeContext,
) -> None:
    context = make_context(keep_models=False)
    outcome = run_job(job(SAME, max_steps=2, batch_size=16), FAMILY, context, ignore)
    assert outcome.status == "succeeded"
    assert [step.trained_groups for step in outcome.steps] == [0, 0]
    assert [step.loss for step in outcome.steps] == [None, None]
    assert outcome.delta_norm == 0.0
    assert outcome.final_hash == outcome.base_hash
    assert (outcome.post, outcome.uplift, outcome.uplift_ci) == (outcome.pre, 0.0, (0.0, 0.0))
    noop = noop_outcome("micro", FAMILY, context)
    assert (noop.post, noop.uplift, noop.uplift_ci) == (outcome.post, 0.0, (0.0, 0.0))
    assert outcome.model_ref is None
    assert list(context.work_folder.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("reward", "reason", "words"),
    [
        ("import os; os._exit(3)", "env.exited", "without an answer"),
        ("raise KeyError('gold')", "env.scoring", "gold"),
        ("import time; time.sleep(60)", "env.deadline", "wall-clock"),
    ],
    ids=["crash", "broken rubric", "hang"],
)
def test_broken_environment_is_an_outcome(
    make_context: MakeContext, reward: str, reason: str, words: str
) -> None:
    context = make_context(call_s=2.0)
    outcome = run_job(job(reward, max_steps=1, batch_size=16), FAMILY, context, ignore)
    assert (outcome.status, outcome.reason) == (
        "timed_out" if reason == "env.deadline" else "failed",
        reason,
    )
    assert words in outcome.detail
    assert outcome.pre is not None
    assert (outcome.post, outcome.uplift, outcome.uplift_ci) == (None, None, None)
    assert outcome.cpu_s > 0
    assert list(context.work_folder.iterdir()) == []


def test_training_past_its_deadline_is_an_outcome_and_keeps_its_steps(
    make_context: MakeContext,
) -> None:
    clock = SteppingClock(after_step_s=400.0)
    context = make_context(clock=clock, wall_s=500.0, call_s=450.0)
    outcome = run_job(job(max_steps=8), FAMILY, context, clock.note_step)
    assert (outcome.status, outcome.reason) == ("timed_out", "train.timeout")
    assert 1 <= outcome.train_steps < 8
    assert outcome.final_hash is None


@pytest.mark.parametrize("prompt", ["'7' * 130", "'seven ' * 1_000_000 + str(n)"])
def test_prompt_that_does_not_fit_is_an_outcome(make_context: MakeContext, prompt: str) -> None:
    large = job(prompt=prompt, seq_len=128, max_steps=1, batch_size=16)
    outcome = run_job(large, FAMILY, make_context(), ignore)
    assert outcome.status == "failed"
    assert outcome.reason in ("env.prompt_too_long", "env.rows", "env.protocol")


@pytest.mark.parametrize("reward", ["1e9", "-1e9", "1e-300", "1e9 * len(trace.last_reply) - 4e9"])
def test_rewards_of_any_size_do_not_break_the_trainer(
    make_context: MakeContext, reward: str
) -> None:
    extreme = job(f"return {reward}", max_steps=2, batch_size=16, max_tokens=16)
    outcome = run_job(extreme, FAMILY, make_context(), ignore)
    assert outcome.reason in ("", "env.protocol", "env.scoring")


@pytest.mark.parametrize("family", ["ledger", "triage"])
def test_template_of_a_family_runs_with_its_tools(make_context: MakeContext, family: str) -> None:
    small = with_settings(
        template_job(family), base_model="micro", max_steps=1, batch_size=16, max_tokens=16
    )
    outcome = run_job(small, family, make_context(n=4), ignore)
    assert (outcome.status, outcome.reason, outcome.n) == ("succeeded", "", 4)


def test_tampered_bundle_is_never_started(make_context: MakeContext) -> None:
    good = job()
    changed = dict(good.files) | {"environment/taskset.py": b"raise SystemExit\n"}
    outcome = run_job(Bundle(changed, good.job_hash), FAMILY, make_context(), ignore)
    assert (outcome.status, outcome.reason) == ("failed", "job.hash_mismatch")


def test_unknown_base_is_an_outcome(make_context: MakeContext) -> None:
    context = make_context()
    context = replace(context, bases={"nano": context.bases["nano"]})
    outcome = run_job(job(), FAMILY, context, ignore)
    assert (outcome.status, outcome.reason) == ("failed", "job.unknown_base")
    assert "nano" in outcome.detail


def test_our_own_mistakes_propagate(make_context: MakeContext) -> None:
    class Broken:
        def train(self, request: object, log: object) -> None:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run_job(job(SHORT), FAMILY, make_context(trainer=Broken()), ignore)


class SteppingClock:
    """Stands still but for what it is told each finished training step took."""

    def __init__(self, after_step_s: float) -> None:
        self._now_s = 0.0
        self._after_step_s = after_step_s

    def now(self) -> float:
        return self._now_s

    def monotonic(self) -> float:
        return self._now_s

    def note_step(self, step: StepRecord) -> None:
        self._now_s += self._after_step_s
