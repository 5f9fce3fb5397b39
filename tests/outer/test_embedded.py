import asyncio
import json

import pytest

from nestling.core.errors import LearnerError
from nestling.core.seeds import derive_seed
from nestling.outer.learner import LossSpec, TrainRow

PROMPT = [1, 2, 3, 4, 5]


async def session(learner, handle, name, *, turns=4, delay=0.0):
    """A conversation of several turns with fed tokens between them."""
    ids, logprobs = list(PROMPT), []
    for number in range(turns):
        await asyncio.sleep(delay)
        answer = await learner.sample(
            handle,
            ids,
            session=name,
            seed=derive_seed(7, name, number),
            max_tokens=6,
            temperature=0.7,
        )
        ids += [*answer.ids, 6 + number, 7]
        logprobs += answer.logprobs
    return ids, logprobs


async def sessions(learner, handle, names, delay=lambda name: 0.0):
    async with asyncio.TaskGroup() as tasks:
        running = {
            name: tasks.create_task(session(learner, handle, name, delay=delay(name)))
            for name in names
        }
    return {name: task.result() for name, task in running.items()}


@pytest.mark.long
async def test_tokens_do_not_depend_on_arrival_or_company(embedded):
    learner = embedded()
    handle = await learner.publish()
    names = [f"s{i}" for i in range(12)]  # more than there are slots
    together = await sessions(learner, handle, names)
    shuffled = await sessions(
        learner,
        await learner.publish(),
        names[::-1],
        delay=lambda name: 0.002 * (derive_seed(1, name) % 4),
    )
    alone = {name: await session(learner, handle, name) for name in names}
    for name in names:
        assert together[name][0] == shuffled[name][0] == alone[name][0]
        assert together[name][1] == pytest.approx(alone[name][1], abs=1e-4)


@pytest.mark.long
async def test_lockstep_is_equal_bit_for_bit(embedded):
    learner = embedded(lockstep=True)
    names = [f"s{i}" for i in range(6)]
    one = await sessions(learner, await learner.publish(), names)
    two = await sessions(
        learner,
        await learner.publish(),
        names[::-1],
        delay=lambda name: 0.001 * (derive_seed(2, name) % 3),
    )
    assert one == two


async def test_requests_that_wait_are_decoded_together(embedded):
    learner = embedded(window_s=0.05)
    handle = await learner.publish()
    sizes = []
    decode = handle.sample

    def watch(requests, *more, **named):
        sizes.append(len(requests))
        return decode(requests, *more, **named)

    handle.sample = watch
    await sessions(learner, handle, [f"s{i}" for i in range(8)])
    assert sizes == [8] * 4


async def test_long_turns_come_in_pieces_and_delay_nobody(embedded):
    learner = embedded(window_s=0.0)
    handle = await learner.publish()
    done = []

    async def ask(name, max_tokens):
        answer = await learner.sample(
            handle, PROMPT, session=name, seed=11, max_tokens=max_tokens, temperature=0.7
        )
        done.append(name)
        return answer

    async with asyncio.TaskGroup() as tasks:
        long = tasks.create_task(ask("long", 85))
        await asyncio.sleep(0.001)
        short = tasks.create_task(ask("short", 3))
    assert done == ["short", "long"]
    assert len(long.result().ids) == 85
    assert long.result().ids[:3] == short.result().ids
    whole = embedded(folder="whole", lockstep=True)
    alone = await whole.sample(
        await whole.publish(), PROMPT, session="x", seed=11, max_tokens=85, temperature=0.7
    )
    assert alone.ids == long.result().ids
    assert alone.logprobs == pytest.approx(long.result().logprobs, abs=1e-4)


async def test_changed_history_is_prefilled_again(embedded):
    learner = embedded()
    handle = await learner.publish()

    async def ask(ids, name):
        return await learner.sample(
            handle, ids, session=name, seed=5, max_tokens=6, temperature=0.7
        )

    await ask(PROMPT, "a")
    changed = await ask([9, 8, 7], "a")
    assert changed.ids == (await ask([9, 8, 7], "b")).ids


async def test_cancelled_request_harms_nobody(embedded):
    learner = embedded(window_s=0.02)
    handle = await learner.publish()
    expected = await session(learner, handle, "calm")
    async with asyncio.TaskGroup() as tasks:
        doomed = tasks.create_task(session(learner, handle, "doomed"))
        kept = tasks.create_task(session(learner, await learner.publish(), "calm"))
        await asyncio.sleep(0.005)
        doomed.cancel()
    assert kept.result()[0] == expected[0]


@pytest.mark.parametrize(
    ("ids", "max_tokens", "message"),
    [([1] * 96, 4, "max_total_tokens"), ([], 4, "0 tokens"), ([1], 0, "max_tokens=0")],
)
async def test_wrong_request_fails_alone(embedded, ids, max_tokens, message):
    learner = embedded()
    handle = await learner.publish()
    async with asyncio.TaskGroup() as tasks:
        good = tasks.create_task(session(learner, handle, "good"))
        with pytest.raises(LearnerError, match=message):
            await learner.sample(
                handle, ids, session="bad", seed=0, max_tokens=max_tokens, temperature=0.7
            )
    assert good.result()


async def row(learner, advantage=1.0):
    answer = await learner.sample(
        await learner.publish(), PROMPT, session="r", seed=3, max_tokens=8, temperature=0.7
    )
    return TrainRow(
        ids=PROMPT + answer.ids,
        sampled=[False] * 5 + [True] * len(answer.ids),
        logprobs=[0.0] * 5 + answer.logprobs,
        advantage=advantage,
    )


async def test_kl_pulls_back_to_the_initial_policy(embedded):
    far = {}
    for kl_coef in (0.0, 30.0):
        learner = embedded(folder=f"kl{kl_coef}")
        good = await row(learner)
        loss = LossSpec(temperature=0.7, kl_coef=kl_coef)
        for _ in range(8):
            stats = await learner.forward_backward([good], loss)
            await learner.optim_step(3e-3)
        far[kl_coef] = -stats.kl_sampler
        if kl_coef:
            assert stats.kl_initial > 0
    assert far[30.0] < 0.8 * far[0.0]


async def test_ppo_clip_stops_at_the_ratio(embedded):
    moved = {}
    for kind in ("importance_sampling", "ppo_clip"):
        learner = embedded(folder=kind)
        good = await row(learner)
        for _ in range(12):
            stats = await learner.forward_backward([good], LossSpec(kind=kind, temperature=0.7))
            if stats.clipped_share == 1.0:
                break
            await learner.optim_step(3e-3)
        moved[kind] = -stats.kl_sampler
    assert moved["ppo_clip"] < moved["importance_sampling"]


async def test_changing_the_loss_keeps_the_optimiser(embedded):
    one, two = embedded(folder="one"), embedded(folder="two")
    good = await row(one)
    for learner, kinds in ((one, ["importance_sampling"] * 3), (two, ["importance_sampling", "importance_sampling", "ppo_clip"])):  # fmt: skip
        for kind in kinds:
            await learner.forward_backward([good], LossSpec(kind=kind, clip=0.9, temperature=0.7))
            last = await learner.optim_step(1e-4)
        if learner is one:
            expected = last
    assert last.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    await two.forward_backward([good], LossSpec(temperature=0.7))
    with pytest.raises(LearnerError, match="loss changed"):
        await two.forward_backward([good], LossSpec(temperature=0.5))


async def test_bad_gradient_changes_nothing(embedded):
    learner = embedded()
    good = await row(learner)
    broken = TrainRow(ids=good.ids, sampled=good.sampled, logprobs=[-1e9] * len(good.ids), advantage=1.0)  # fmt: skip
    ref = await learner.save("before")
    await learner.forward_backward([broken], LossSpec(temperature=0.7))
    with pytest.raises(LearnerError, match="finite"):
        await learner.optim_step(1e-3)
    await learner.forward_backward([good], LossSpec(temperature=0.7))
    first = await learner.optim_step(1e-3)
    await learner.load(ref)
    await learner.forward_backward([good], LossSpec(temperature=0.7))
    assert await learner.optim_step(1e-3) == first


async def test_state_of_another_agent_is_refused(embedded):
    ref = await embedded(model_seed=0).save("a")
    with pytest.raises(LearnerError, match="other weights"):
        await embedded(model_seed=1).load(ref)
    with pytest.raises(LearnerError, match="lora_rank"):
        await embedded(lora_rank=4).load(ref)


async def test_damaged_state_is_refused(embedded, tmp_path):
    learner = embedded()
    await learner.save("a")
    (tmp_path / "states/a/model.safetensors").write_bytes(b"broken")
    with pytest.raises(LearnerError, match="cannot be loaded"):
        await learner.load("a")
    (tmp_path / "states/a/state.json").write_text("{}")
    with pytest.raises(LearnerError, match="not a saved learner"):
        await learner.load("a")
    with pytest.raises(LearnerError, match="cannot name"):
        await learner.save("../a")


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_old_states_keep_weights_but_not_the_optimiser(embedded, lora_rank):
    learner = embedded(lora_rank=lora_rank)
    good = await row(learner)
    samples = []
    for step in range(4):
        await learner.save(f"step-{step}")
        policy = await learner.publish()
        samples.append(await session(learner, policy, "probe"))
        await learner.forward_backward([good], LossSpec(temperature=0.7))
        await learner.optim_step(1e-2)
    for step in range(4):
        policy = await learner.open_policy(f"step-{step}")
        assert policy.version == step
        assert await session(learner, policy, "probe") == samples[step]
    await learner.load("step-2")
    with pytest.raises(LearnerError, match="newest states"):
        await learner.load("step-0")


async def test_full_disk_is_said_and_leaves_the_old_state(embedded, tmp_path):
    learner = embedded()
    await learner.save("a")
    before = json.loads((tmp_path / "states/a/state.json").read_text())
    (tmp_path / "states/.new-a").write_text("in the way")
    with pytest.raises(LearnerError, match="could not be saved"):
        await learner.save("a")
    assert json.loads((tmp_path / "states/a/state.json").read_text()) == before


async def test_a_crash_while_a_state_is_replaced_leaves_the_old_one(embedded, tmp_path):
    """Between two renames there is none of that name."""
    learner = embedded()
    await learner.save("a")
    (tmp_path / "states/a").rename(tmp_path / "states/.old-a")
    await learner.load("a")
    await learner.save("a")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["a"]


async def test_closed_learner_says_so(embedded):
    learner = embedded()
    handle = await learner.publish()
    learner.close()
    learner.close()
    with pytest.raises(LearnerError, match="closed"):
        await learner.publish()
    with pytest.raises(LearnerError, match="closed"):
        await session(learner, handle, "s")


async def test_closed_learner_says_so_to_everyone_who_waits(embedded):
    learner = embedded(num_sessions=1)
    handle = await learner.publish()
    learner.close()
    asked = [asyncio.ensure_future(session(learner, handle, name)) for name in "abc"]
    await asyncio.wait(asked, timeout=20)
    assert [type(one.exception()) for one in asked] == [LearnerError] * 3
