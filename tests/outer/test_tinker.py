"""The Tinker learner over a service with real weights: our engine behind the service's calls."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import threading

import numpy as np
import pytest
from pydantic import ValidationError

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, LearnerError
from nestling.outer.config import TinkerConfig
from nestling.outer.learner import LossSpec, TrainRow
from nestling.outer.learners import tinker_loss
from nestling.outer.learners.tinker_calls import Caller
from nestling.outer.learners.tinker_faults import PauseWatch, TinkerFaultError, fault_of
from nestling.outer.learners.tinker_prices import Prices, Usage, read_prices
from nestling.outer.learners.tinker_service import TinkerService, read_key

pytestmark = pytest.mark.long

PROMPT = [1, 2, 3]
PRICES = Prices(prefill=1.0, cached_prefill=0.2, sample=4.0, train=3.0)
KEY = "tml-very-secret"


async def rows(learner, count=4, temperature=1.0):
    handle = await learner.publish()
    found = []
    for index in range(count):
        answer = await learner.sample(
            handle, PROMPT, session=f"{index}", seed=index, max_tokens=6, temperature=temperature
        )
        found.append(
            TrainRow(
                ids=PROMPT + answer.ids,
                sampled=[False] * 3 + [True] * len(answer.ids),
                logprobs=[0.0] * 3 + answer.logprobs,
                advantage=1.0 if index % 2 else -0.5,
            )
        )
    return found


async def step(learner, loss=None, batch=None):
    stats = await learner.forward_backward(batch or await rows(learner), loss or LossSpec())
    await learner.optim_step(1e-3)
    return stats


@pytest.mark.parametrize(
    "loss",
    [LossSpec(), LossSpec(kind="ppo_clip", clip=0.05), LossSpec(kl_coef=0.5)],
    ids=["importance", "clip", "kl"],
)
async def test_update_is_the_embedded_learners(tinker, embedded, loss):
    ours, theirs = tinker(), embedded(max_grad_norm=1e9)
    batch = await rows(ours)
    for _ in range(2):
        mine = await step(ours, loss, batch)
        other = await step(theirs, loss, batch)
        assert mine.loss == pytest.approx(other.loss, abs=2e-5)
        assert mine.num_tokens == other.num_tokens
        assert mine.kl_sampler == pytest.approx(other.kl_sampler, abs=2e-5)
        assert mine.clipped_share == pytest.approx(other.clipped_share)
        if loss.kl_coef:
            assert mine.kl_initial == pytest.approx(other.kl_initial, abs=2e-5)
    if loss.kl_coef == 0:  # the pull is taken at sampling, the second step is not the same
        now, before = await rows(ours), await rows(theirs)
        for one, two in zip(now, before, strict=True):
            assert one.ids == two.ids
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


async def test_gradient_of_the_kl_term_is_the_embedded_learners(tinker, embedded):
    ours, theirs, loss = tinker(), embedded(max_grad_norm=1e9), LossSpec(kl_coef=0.5)
    await step(ours)
    await step(theirs)
    fresh = await rows(ours)  # on policy, and away from the initial one
    for learner in (ours, theirs):
        await learner.forward_backward(fresh, loss)
    mine, other = [await learner.optim_step(1e-3) for learner in (ours, theirs)]
    assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


async def test_only_temperature_one(tinker):
    learner = tinker()
    with pytest.raises(LearnerError, match=r"outer\.temperature = 1\.0"):
        await rows(learner, 1, temperature=0.7)
    with pytest.raises(LearnerError, match="temperature"):
        await learner.forward_backward(await rows(learner), LossSpec(temperature=0.7))


async def test_resume_in_a_new_process_and_retention(tinker, tmp_path):
    first = tinker(keep_states=2)
    for number in range(4):
        if number:
            await step(first)
        await first.save(f"step-{number}")
    spent = first.usage
    again = tinker(keep_states=2)
    await again.load("step-3")
    assert (await again.publish()).version == 3
    assert again.usage == spent
    assert await step(again) == await step(first)
    with pytest.raises(LearnerError, match="keep_states"):
        await again.load("step-1")
    # What is not resumed from any more can still be sampled, the untrained one for ever.
    assert [(await again.open_policy(f"step-{n}")).version for n in range(4)] == [0, 1, 2, 3]
    kept = [path for path in tinker.service.paths if path.startswith("weights/")]
    assert len(kept) == 2
    assert KEY not in "".join(path.read_text() for path in (tmp_path / "tinker").iterdir())


async def test_settings_of_another_run_are_refused(tinker):
    learner = tinker()
    await step(learner)
    await learner.save("one")
    with pytest.raises(LearnerError, match="lora_rank"):
        await tinker(lora_rank=16).load("one")


async def test_expired_checkpoint_says_so(tinker):
    learner = tinker()
    await step(learner)
    await learner.save("one")
    tinker.service.paths.clear()
    with pytest.raises(TinkerFaultError, match="checkpoint_ttl_s") as caught:
        await tinker().load("one")
    assert caught.value.kind == "missing"


async def test_cost_is_counted_and_capped(tinker):
    learner = tinker(prices=PRICES)
    batch = await rows(learner, 2)
    await step(learner, batch=batch)
    sampled = sum(sum(row.sampled) for row in batch)
    trained = sum(len(row.ids) - 1 for row in batch)
    assert learner.usage == Usage(prefill=6, sample=sampled, train=trained)
    cost = learner.costs()
    assert cost["learner/step_usd"] == pytest.approx(PRICES.usd(learner.usage))
    assert cost["learner/train_tokens"] == trained
    assert learner.costs()["learner/step_usd"] == 0
    poor = tinker(prices=PRICES, max_usd=1e-6, folder="poor")
    with pytest.raises(TinkerFaultError, match="max_usd") as caught:
        await rows(poor, 2)
    assert caught.value.kind == "budget"
    with pytest.raises(LearnerError, match="price"):
        tinker(max_usd=1.0)


async def test_episodes_that_play_together_do_not_pass_the_cap(tinker):
    most = Usage(prefill=len(PROMPT), sample=6)
    learner = tinker(prices=PRICES, max_usd=PRICES.usd(most) * 3.5)
    handle = await learner.publish()
    made, before = [], len(tinker.service.timeouts)

    async def turn(n):
        ask = {"session": f"{n}", "seed": n, "max_tokens": 6, "temperature": 1.0}
        try:
            made.append(await learner.sample(handle, PROMPT, **ask))
        except TinkerFaultError as error:
            assert error.kind == "budget"  # noqa: PT017 (counted below)

    async with asyncio.TaskGroup() as tasks:
        for n in range(8):
            tasks.create_task(turn(n))
    assert len(made) == len(tinker.service.timeouts) - before == 3
    used = sum(len(one.ids) for one in made)
    assert learner.usage == Usage(prefill=3 * len(PROMPT), sample=used)


async def test_what_a_killed_process_spent_is_on_disk(tinker):
    """Another learner reads the folder of one that is not closed, as after a kill."""
    learner = tinker(prices=PRICES)
    await step(learner)
    assert tinker().usage == learner.usage
    handle, real = await learner.publish(), tinker.service.sample
    call = Hangs()
    tinker.service.sample = lambda *args, **options: call
    turn = learner.sample(handle, PROMPT, session="s", seed=0, max_tokens=9, temperature=1.0)
    under_way = asyncio.ensure_future(turn)
    await asyncio.to_thread(call.started.wait, 30)
    most = learner.usage + Usage(prefill=len(PROMPT), sample=9)
    assert tinker().usage == most
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert learner.usage == tinker().usage == most  # the service may go on with it
    tinker.service.sample = real
    batch = await rows(learner)
    before = learner.usage
    tinker.service.forward_backward = lambda *args: Hangs(error=StatusError(500)).ended()
    with pytest.raises(TinkerFaultError, match="500"):
        await learner.forward_backward(batch, LossSpec())
    trained = sum(len(row.ids) - 1 for row in batch)
    assert tinker().usage == before + Usage(train=trained)


class Hangs:
    """A call that takes until it is told to go on."""

    def __init__(self, value=None, error=None):
        self.go, self.started, self.cancelled = threading.Event(), threading.Event(), False
        self._value, self._error = value, error

    def result(self, timeout_s):
        self.started.set()
        self.go.wait(30)
        if self._error:
            raise self._error
        return self._value

    def cancel(self):
        self.cancelled = True
        self.go.set()

    def ended(self):
        self.go.set()
        return self


@pytest.fixture
def watch():
    made = PauseWatch(SystemClock(), secrets=(KEY,))
    yield made
    made.close()


async def test_call_that_hangs_ends_at_its_limit_and_says_so_meanwhile(watch, caplog):
    caller = Caller(watch, SystemClock(), heartbeat_s=0.01)
    call = Hangs()
    with caplog.at_level(logging.INFO), pytest.raises(TinkerFaultError) as caught:
        await caller.call("sample", 0.1, call)
    assert caught.value.kind == "timeout"
    assert "sample has been waiting" in caplog.text
    assert call.cancelled


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("The job is paused due to billing status. Error: 402 %s", "billing"),
        ("Training for x is paused. Reason: concurrent training clients rate limit hit.%s", "rate_limit"),
        ("Sampling is paused for sampler y. Reason: Tinker backend is running short on capacity%s", "capacity"),
    ],
)  # fmt: skip
async def test_pause_is_reported_as_what_it_is(watch, caplog, line, kind):
    told = []
    watch._on_pause = told.append
    caller = Caller(watch, SystemClock(), heartbeat_s=0.01)
    call = Hangs()

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_error(caller.call("train", 0.2, call)))
        await asyncio.to_thread(call.started.wait, 30)
        logging.getLogger("tinker.lib.somewhere").warning(line, KEY)
    error = waiting.result()
    assert error.kind == kind
    assert "paused" in str(error)
    assert [pause.kind for pause in told] == [kind]
    assert KEY not in str(error) + told[0].detail


async def _error(awaitable):
    with pytest.raises(TinkerFaultError) as caught:
        await awaitable
    return caught.value


async def test_other_lines_of_the_sdk_are_not_pauses(watch):
    logging.getLogger("tinker").warning("Retrying request because of try_again")
    assert watch.current() is None


async def test_cancelled_call_gives_up_its_thread(watch):
    caller = Caller(watch, SystemClock(), heartbeat_s=10)
    call = Hangs()
    task = asyncio.ensure_future(caller.call("sample", 60, call))
    await asyncio.to_thread(call.started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled


class StatusError(Exception):
    def __init__(self, status_code):
        super().__init__(f"answered {status_code} to {KEY}")
        self.status_code = status_code


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [(401, "key", "TINKER_API_KEY"), (402, "billing", "payment"), (429, "rate_limit", "limit"),
     (404, "missing", "ttl"), (503, "capacity", "later"), (500, "failed", "resume")],
)  # fmt: skip
def test_status_deep_in_the_chain_names_the_trouble(status, kind, advice):
    error = ValueError("Error retrieving result")
    error.__cause__ = StatusError(status)
    fault = fault_of("optim_step", error, (KEY,))
    assert fault.kind == kind
    assert advice in str(fault)
    assert KEY not in str(fault_of("x", StatusError(status), (KEY,)))


async def test_turn_that_took_too_long_is_asked_for_again(tinker):
    learner = tinker(sample_timeout_s=0.2, sample_attempts=2)
    handle = await learner.publish()
    service, calls = tinker.service, []
    real = service.sample

    def sample(*args, **options):
        calls.append(options["seed"])
        return Hangs() if len(calls) == 1 else real(*args, **options)

    service.sample = sample
    ask = {"session": "s", "max_tokens": 4, "temperature": 1.0}
    answer = await learner.sample(handle, PROMPT, seed=2**40 + 5, **ask)
    assert answer.ids
    assert calls == [5, 5]
    # The first try is counted as if it had been played to its end.
    assert learner.usage == Usage(prefill=2 * len(PROMPT), sample=4 + len(answer.ids))
    service.sample = lambda *args, **options: Hangs()
    with pytest.raises(TinkerFaultError) as caught:
        await learner.sample(handle, PROMPT, seed=1, **ask)
    assert caught.value.kind == "timeout"


async def test_every_call_has_a_limit(tinker):
    learner = tinker(train_timeout_s=77.0, sample_timeout_s=33.0)
    await step(learner)
    await learner.save("x")
    await tinker().load("x")
    assert set(tinker.service.timeouts[:-1]) == {77.0, 33.0}


def test_answer_that_does_not_fit_is_a_fault():
    row = TrainRow(ids=[1, 2], sampled=[False, True], logprobs=[0.0, -1.0], advantage=1.0)
    for wrong in (np.zeros(2), np.array([np.nan])):
        with pytest.raises(TinkerFaultError):
            tinker_loss.stats([row], [wrong], LossSpec())


def test_prices_are_read_from_the_published_form(tmp_path):
    path = tmp_path / "models.json"
    entry = {"tinker_id": "m", "prefill": "$0.50", "cached_prefill": "$0.10", "sample": "$1,000", "train": "2"}  # fmt: skip
    path.write_text(json.dumps([{"tinker_id": "other"}, entry]))
    assert read_prices("m", str(path)) == Prices(
        prefill=0.5, cached_prefill=0.1, sample=1000.0, train=2.0
    )
    with pytest.raises(ConfigError, match="gives 'other' no price"):
        read_prices("other", str(path))
    with pytest.raises(ConfigError, match="no price of 'x'"):
        read_prices("x", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices("x", str(tmp_path / "none.json"))


def test_key_comes_from_the_environment_alone():
    assert read_key({"TINKER_API_KEY": f" {KEY}\n"}) == KEY
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set"):
        read_key({})
    assert not any("key" in name for name in TinkerConfig.model_fields)


@pytest.mark.skipif(importlib.util.find_spec("tinker") is not None, reason="the SDK is installed")
def test_missing_sdk_names_the_extra():
    with pytest.raises(ConfigError, match=r"nestling\[tinker\]"):
        TinkerService(KEY)


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000", "ftp://host", "host:8000"])
def test_a_key_never_travels_in_the_clear(url):
    with pytest.raises(ValidationError, match="in the clear"):
        TinkerConfig(base_model="tiny", base_url=url)
    TinkerConfig(base_model="tiny", base_url="http://127.0.0.1:8000")
