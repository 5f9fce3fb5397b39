"""An episode asked to take its turns: it ends exactly once and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from nestling.core.errors import LearnerError
from nestling.outer.bridge.inversion import InvertedEpisode
from nestling.outer.learner import Sampled

ASK = {"session": "s", "seed": 0, "max_tokens": 5, "temperature": 1.0}


def turn(number):
    return Sampled(ids=[number], logprobs=[-1.0], stopped=True)


def tasks():
    return asyncio.all_tasks() - {asyncio.current_task()}


class Script:
    """Takes turns, then returns, fails, hangs or asks twice; counts its clean-ups."""

    def __init__(self, turns=2, *, fail=None, hang=None, twice=False, early=False, orphan=False):
        self.turns, self.fail, self.hang, self.twice = turns, fail, hang, twice
        self.early, self.orphan = early, orphan
        self.cleaned = 0
        self.left = []

    async def __call__(self, sampler):
        ids = [1]
        try:
            if self.early:
                raise ValueError("broken workspace")
            if self.twice:
                async with asyncio.TaskGroup() as group:
                    group.create_task(sampler.sample(ids, **ASK))
                    group.create_task(sampler.sample(ids, **ASK))
            for number in range(self.turns):
                if self.orphan and number == 1:
                    # A child task that nobody awaits is stuck in the sampler when the episode ends.
                    self.left.append(asyncio.ensure_future(sampler.sample(ids, **ASK)))
                    await asyncio.sleep(0)
                    return ids
                ids += (await sampler.sample(ids, **ASK)).ids
                if self.fail == number:
                    raise ValueError("harness bug")
                if self.hang == number:
                    await asyncio.Event().wait()
            return ids
        finally:
            await asyncio.sleep(0)  # cleaning up takes a while and must be waited for
            self.cleaned += 1


async def drive(episode):
    """The loop's side; the ids of every request."""
    seen = []
    while (wanted := await episode.next_request()) is not None:
        seen.append(wanted.ids)
        episode.answer(turn(10 + len(seen)))
    return seen


async def finished(episode, script):
    await episode.close()
    await episode.close()
    assert script.cleaned == 1
    assert episode.is_done
    for task in script.left:
        await asyncio.wait({task})
    assert not tasks()


async def test_turns_go_back_and_forth():
    script = Script(3)
    episode = InvertedEpisode(script, name="a")
    assert await drive(episode) == [(1,), (1, 11), (1, 11, 12)]
    assert episode.result() == [1, 11, 12, 13]
    await finished(episode, script)


@pytest.mark.parametrize("script", [Script(early=True), Script(fail=1)], ids=["early", "late"])
async def test_error_of_the_episode_reaches_the_loop(script):
    script.cleaned = 0
    episode = InvertedEpisode(script, name="a")
    with pytest.raises(ValueError, match=r"broken workspace|harness bug"):
        await drive(episode)
    await finished(episode, script)


async def test_episode_that_takes_too_long_is_ended():
    script = Script(hang=0)
    episode = InvertedEpisode(script, name="a", timeout_s=0.05)
    with pytest.raises(TimeoutError):
        await drive(episode)
    await finished(episode, script)


async def test_time_the_loop_takes_counts_too():
    script = Script()
    episode = InvertedEpisode(script, name="a", timeout_s=0.05)
    assert await episode.next_request() is not None
    await asyncio.wait({episode._task})
    assert not episode.answer(turn(5))
    with pytest.raises(TimeoutError):
        await episode.next_request()
    await finished(episode, script)


async def test_loop_that_is_cancelled_closes_the_episode():
    script = Script(hang=0)
    episode = InvertedEpisode(script, name="a")
    driving = asyncio.ensure_future(drive(episode))
    await episode._sampler._asked.wait()
    await asyncio.sleep(0)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert not episode.is_done
    await finished(episode, script)


async def test_cancelled_wait_loses_no_request():
    script = Script(1)
    episode = InvertedEpisode(script, name="a")
    waiting = asyncio.ensure_future(episode.next_request())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await drive(episode) == [(1,)]
    await finished(episode, script)


async def test_second_turn_at_once_is_refused():
    script = Script(twice=True)
    episode = InvertedEpisode(script, name="a")
    with pytest.raises(ExceptionGroup) as caught:
        await drive(episode)
    assert caught.group_contains(LearnerError, match="one at a time")
    await finished(episode, script)


async def test_task_the_episode_left_behind_is_let_go():
    script = Script(2, orphan=True)
    episode = InvertedEpisode(script, name="a")
    await drive(episode)
    await finished(episode, script)
    assert script.left[0].cancelled()


async def test_what_an_episode_waited_for_was_cancelled():
    async def play(sampler):
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    episode = InvertedEpisode(play, name="a")
    with pytest.raises(LearnerError, match="cancelled"):
        await episode.next_request()
    await episode.close()
    assert not tasks()


async def test_answers_need_a_request():
    script = Script(1)
    episode = InvertedEpisode(script, name="a")
    assert not episode.answer(turn(1))
    await episode.next_request()
    assert episode.answer(turn(1))
    assert not episode.answer(turn(2))
    await finished(episode, script)


async def test_closed_before_its_first_turn():
    script = Script()
    episode = InvertedEpisode(script, name="a")
    await asyncio.sleep(0)
    await episode.close()
    assert episode.is_done
    assert not tasks()


async def test_closed_episode_asks_for_nothing_any_more():
    script = Script()
    episode = InvertedEpisode(script, name="a")
    await episode.next_request()
    sampler = episode._sampler
    await finished(episode, script)
    with pytest.raises(LearnerError, match="was closed"):
        await sampler.sample([1], **ASK)
