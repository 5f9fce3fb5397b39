"""What every learner promises."""

import asyncio

import pytest

from nestling.core.errors import LearnerError
from nestling.outer.learner import LossSpec, TrainRow

PROMPT = [1, 2, 3]


def temperature(learner):
    """A hosted service knows one only."""
    return getattr(learner, "temperature", 0.7)


async def turn(learner, handle, *, session="s", seed=1, ids=PROMPT, max_tokens=12):
    return await learner.sample(
        handle,
        ids,
        session=session,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature(learner),
    )


async def rows(learner, handle, count=6, **fields):
    found = []
    for index in range(count):
        answer = await turn(learner, handle, session=f"row{index}", seed=100 + index)
        found.append(
            TrainRow(
                ids=PROMPT + answer.ids,
                sampled=[False] * 3 + [True] * len(answer.ids),
                logprobs=[0.0] * 3 + answer.logprobs,
                advantage=1.0 if index % 2 else -1.0,
                **fields,
            )
        )
    return found


async def update(learner, handle=None, lr=1e-2):
    handle = handle or await learner.publish()
    loss = LossSpec(temperature=temperature(learner))
    stats = await learner.forward_backward(await rows(learner, handle), loss)
    return stats, await learner.optim_step(lr)


async def test_sampling_repeats(new_learner):
    learner = new_learner()
    handle = await learner.publish()
    first = await turn(learner, handle)
    other = await turn(learner, handle, session="t", seed=2)
    again = await turn(learner, handle, session="u")
    assert again.ids == first.ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert other.ids != first.ids
    assert all(value <= 0 for value in first.logprobs)


@pytest.mark.long
async def test_turn_ends_by_itself_or_at_the_limit(new_learner):
    learner = new_learner()
    handle = await learner.publish()
    turns = [await turn(learner, handle, session=f"{i}", seed=i, max_tokens=4) for i in range(40)]
    assert {len(one.ids) for one in turns if not one.stopped} == {4}
    assert all(1 <= len(one.ids) <= 4 and len(one.ids) == len(one.logprobs) for one in turns)
    ends = {one.ids[-1] for one in turns if one.stopped}
    assert len(ends) <= 1


@pytest.mark.long
async def test_published_policy_never_changes(new_learner):
    learner = new_learner()
    old = await learner.publish()
    before = await turn(learner, old)
    for _ in range(3):
        await update(learner, lr=0.1)
    new = await learner.publish()
    assert (old.version, new.version) == (0, 3)
    # Both versions at once, an old session and a fresh one.
    async with asyncio.TaskGroup() as tasks:
        kept = tasks.create_task(turn(learner, old, session="fresh"))
        moved = tasks.create_task(turn(learner, new, session="fresh"))
    assert kept.result().ids == before.ids
    assert kept.result().logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert moved.result().logprobs[0] != pytest.approx(before.logprobs[0], abs=1e-4)


async def test_first_update_sees_the_samplers_probabilities(new_learner):
    learner = new_learner()
    stats, done = await update(learner)
    assert stats.kl_sampler == pytest.approx(0.0, abs=1e-4)
    if stats.max_logprob_gap is not None:
        assert stats.max_logprob_gap < 1e-4
    assert stats.num_tokens > 6
    assert done.version == 1
    assert done.grad_norm > 0


async def test_update_makes_good_tokens_likelier(new_learner):
    learner = new_learner()
    handle = await learner.publish()
    batch = await rows(learner, handle)
    good = [TrainRow(ids=one.ids, sampled=one.sampled, logprobs=one.logprobs, advantage=1.0) for one in batch]  # fmt: skip
    for _ in range(4):
        stats = await learner.forward_backward(good, LossSpec(temperature=temperature(learner)))
        await learner.optim_step(1e-2)
    assert stats.kl_sampler < -0.01


@pytest.mark.long
async def test_saved_state_gives_the_same_numbers_again(new_learner):
    learner = new_learner()
    await update(learner)
    ref = await learner.save("here")
    onward = [(await update(learner)) for _ in range(2)]
    await learner.load(ref)
    again = [(await update(learner)) for _ in range(2)]
    other = new_learner()
    await other.load(ref)
    elsewhere = [(await update(other)) for _ in range(2)]
    assert onward == again == elsewhere
    assert onward[-1][1].version == 3


async def test_saving_again_replaces(new_learner):
    learner = new_learner()
    await learner.save("x")
    await update(learner)
    ref = await learner.save("x")
    fresh = new_learner()
    await fresh.load(ref)
    assert (await fresh.publish()).version == 1


async def test_load_drops_a_pending_gradient(new_learner):
    learner = new_learner()
    ref = await learner.save("x")
    batch = await rows(learner, await learner.publish())
    await learner.forward_backward(batch, LossSpec(temperature=temperature(learner)))
    await learner.load(ref)
    with pytest.raises(LearnerError):
        await learner.optim_step(1e-2)


async def test_what_cannot_be_done_is_a_learner_error(new_learner):
    learner = new_learner()
    with pytest.raises(LearnerError, match="pending"):
        await learner.optim_step(1e-3)
    with pytest.raises(LearnerError, match="sampled token"):
        await learner.forward_backward([], LossSpec())
    with pytest.raises(LearnerError):
        await learner.load("nowhere")
