"""Our episodes as environments of tinker-cookbook; the only module that imports it.

The types used here are the same in 0.5.2, 0.5.8 and 0.6.1. Each observation is the whole token history,
which grows by appending alone, so that an episode is one datum. What goes wrong inside an episode is its
reward, not the end of the run; what goes wrong in the loop's own sampler is the loop's to raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)

from nestling.outer.bridge.episodes import FAULT_REWARD, EpisodePay, Play
from nestling.outer.bridge.inversion import InvertedEpisode, TurnWanted
from nestling.outer.config import OuterConfig, TinkerConfig
from nestling.outer.learner import Sampled
from nestling.outer.plan import EpisodePlan, GroupPlan, plan_group
from nestling.outer.service_loss import service_loss

__all__ = ["EpisodeDataset", "EpisodeEnv", "EpisodeGroup", "dataset_builder", "train_with_cookbook"]


class EpisodeEnv(Env):  # type: ignore[misc]  # untyped where the cookbook is not installed
    """One episode; single-use. Whoever makes it closes it, whatever happened."""

    def __init__(
        self, play: Play, *, name: str, stop_ids: Sequence[int], timeout_s: float | None
    ) -> None:
        self._play = play
        self._name = name
        self._stop_ids = list(stop_ids)
        self._timeout_s = timeout_s
        self._episode: InvertedEpisode[EpisodePay] | None = None

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, list[int]] | InitialObservationOverflow:
        """Start the episode; one that ends before its first turn is paid without training tokens."""
        self._episode = InvertedEpisode(self._play, name=self._name, timeout_s=self._timeout_s)
        wanted, pay = await self._next()
        if wanted is None:
            return InitialObservationOverflow(pay.reward, dict(pay.metrics), dict(pay.logs))
        return _observation(wanted), self._stop_ids

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Hand the episode a turn and wait for the next one, or for its end."""
        assert self._episode is not None, "initial_observation comes first"
        stopped = (extra or {}).get("stop_reason", "stop") == "stop"
        turn = Sampled(ids=list(action), logprobs=[0.0] * len(action), stopped=stopped)
        # An episode that ended meanwhile does not take it: _next says why.
        self._episode.answer(turn)
        wanted, pay = await self._next()
        if wanted is None:
            end = tinker.ModelInput.empty()
            return StepResult(pay.reward, True, end, [], dict(pay.metrics), dict(pay.logs))
        return StepResult(0.0, False, _observation(wanted), self._stop_ids)

    def cancel(self) -> None:
        """Ask the episode to end; `close` waits for it."""
        if self._episode is not None:
            self._episode.cancel()

    async def close(self) -> None:
        """End the episode and wait for its own clean-up; may be called twice."""
        if self._episode is not None:
            await self._episode.close()

    async def _next(self) -> tuple[TurnWanted | None, EpisodePay]:
        assert self._episode is not None
        try:
            wanted = await self._episode.next_request()
        except Exception as error:  # noqa: BLE001 (one broken episode costs itself, not the run)
            kind = type(error).__name__
            metrics = {f"episode_error/{kind}": 1.0}
            logs = {"error": f"{kind}: {error}"[:500]}
            return None, EpisodePay(reward=FAULT_REWARD, metrics=metrics, logs=logs)
        if wanted is None:
            return None, self._episode.result()
        return wanted, EpisodePay(reward=0.0)


class EpisodeGroup(EnvGroupBuilder):  # type: ignore[misc]
    """The episodes of one planned group."""

    def __init__(
        self,
        plan: GroupPlan,
        make_play: Callable[[EpisodePlan], Play],
        *,
        stop_ids: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        self._plan = plan
        self._make_play = make_play
        self._stop_ids = stop_ids
        self._timeout_s = timeout_s
        self._made: list[EpisodeEnv] = []

    async def make_envs(self) -> Sequence[Env]:
        """Fresh episodes; a loop that retries asks again."""
        fresh = [
            EpisodeEnv(
                self._make_play(one),
                name=one.episode_id,
                stop_ids=self._stop_ids,
                timeout_s=self._timeout_s,
            )
            for one in self._plan.episodes
        ]
        self._made += fresh
        return fresh

    async def cleanup(self) -> None:
        """Called on success, error and cancellation alike: no episode outlives its group."""
        for env in self._made:
            env.cancel()
        for env in self._made:
            await env.close()
        self._made.clear()

    def logging_tags(self) -> list[str]:
        """The family."""
        return [self._plan.family]


class EpisodeDataset(RLDataset):  # type: ignore[misc]
    """The groups of a run: the same plan as our own loop's."""

    def __init__(
        self,
        config: OuterConfig,
        families: Sequence[str],
        make_play: Callable[[EpisodePlan], Play],
        *,
        stop_ids: Sequence[int],
    ) -> None:
        self._config = config
        self._families = families
        self._make_play = make_play
        self._stop_ids = stop_ids

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of step `index`, counted from 0."""
        per_step = self._config.groups_per_step
        return [
            EpisodeGroup(
                plan_group(self._config, self._families, number),
                self._make_play,
                stop_ids=self._stop_ids,
                timeout_s=self._config.episode_timeout_s,
            )
            for number in range(index * per_step, (index + 1) * per_step)
        ]

    def __len__(self) -> int:
        return self._config.steps


def dataset_builder(dataset: EpisodeDataset) -> RLDatasetBuilder:
    """What `rl.train.Config` takes; the cookbook wants a class that it can print."""

    @chz.chz
    class EpisodeDatasetBuilder(RLDatasetBuilder):  # type: ignore[misc]
        """Gives the dataset that it was made for; nothing is kept for tests."""

        async def __call__(self) -> tuple[RLDataset, Any]:
            return dataset, None

    return EpisodeDatasetBuilder()


async def train_with_cookbook(
    config: OuterConfig,
    learner: TinkerConfig,
    dataset: EpisodeDataset,
    *,
    tokenizer_folder: Path,
    log_path: Path,
) -> None:
    """The cookbook's own loop over our episodes; resumes from its own checkpoints in `log_path`.

    Settings that our loop has and the cookbook's has not are left out: warm-up, `epochs`, `kl_coef`, what becomes
    of groups that are too stale.
    """
    from tinker_cookbook.rl import train
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import AutoTokenizer

    register_tokenizer(
        learner.base_model, lambda: AutoTokenizer.from_pretrained(str(tokenizer_folder))
    )
    loss, settings = service_loss(config.loss, config.clip)
    pace: dict[str, Any] = {
        "max_steps_off_policy": config.max_staleness,
        "groups_per_batch": config.groups_per_step,
    }
    if "loss_fn" in inspect.signature(train.AsyncConfig).parameters:
        pace |= {"loss_fn": loss}  # 0.6: an async loss of its own
    await train.main(
        train.Config(
            model_name=learner.base_model,
            recipe_name="nestling",
            base_url=learner.base_url or None,
            log_path=str(log_path),
            dataset_builder=dataset_builder(dataset),
            learning_rate=config.learning_rate,
            lora_rank=learner.lora_rank,
            loss_fn=loss,
            loss_fn_config=settings or None,
            temperature=config.temperature,
            max_tokens=config.max_turn_tokens,
            ttl_seconds=learner.checkpoint_ttl_s,
            rollout_error_tolerance=True,
            eval_every=0,
            save_every=1,
            num_groups_to_log=0,
            async_config=train.AsyncConfig(**pace) if config.max_staleness else None,
        )
    )


def _observation(wanted: TurnWanted) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(wanted.ids))
