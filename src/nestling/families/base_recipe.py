"""Recipes of the shipped base models: shapes, data budgets, target scores."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.engine.config import ModelConfig
from nestling.families.vocabulary import tokenizer

__all__ = ["RECIPES", "BaseRecipe", "recipe"]


class BaseRecipe(Frozen):
    """Everything that fixes one base model; with the seed it can be built again."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    seed: int = Field(0, ge=0, le=63)
    targets: dict[str, float]
    """Score at temperature 1 to aim at, per family; for a limited one the highest that will do."""
    shares: dict[str, float] = Field(default_factory=dict)
    """How often a family is demonstrated, 1 for the others; little leaves a limit of skill."""
    clean_tokens: int = Field(ge=1)
    """Tokens of error-free demonstrations; fewer leave a real limit of skill."""
    clean_batch_episodes: int = Field(96, ge=1)
    clean_lr: float = Field(2e-3, gt=0)
    clean_warmup_steps: int = Field(200, ge=0)
    clean_decay_share: float = Field(0.4, ge=0, le=1)
    """Last part of the steps in which the rate falls to zero; 0 stops the training cold."""
    noisy_steps: int = Field(400, ge=1)
    noisy_batch_episodes: int = Field(32, ge=1)
    noisy_episodes: int = Field(6400, ge=1)
    """Different episodes; seen more than once when the steps need more."""
    noisy_lr: float = Field(5e-4, gt=0)
    noisy_warmup_steps: int = Field(20, ge=0)
    noisy_decay_share: float = Field(0.6, ge=0, le=1)
    sweep: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 3.2, 5.0, 7.0)
    """Noise knobs tried first, the same for all families."""
    refits: tuple[tuple[float, ...], ...] = ((0.85, 0.95, 1.05, 1.15), (0.94, 0.98, 1.02, 1.06))
    """Per round, the factors on the noise that the points so far suggest."""
    sweep_items: int = Field(300, ge=1)
    refit_items: int = Field(400, ge=1)
    final_items: int = Field(800, ge=1)
    """Items per family; the final ones are fresh."""

    @property
    def limited(self) -> frozenset[str]:
        """Families that are demonstrated rarely: little practice sets their score, not noise."""
        return frozenset(name for name, share in self.shares.items() if share < 1)

    def model_config_of(self) -> ModelConfig:
        """The decoder's shape."""
        return ModelConfig(
            vocab_size=-(-tokenizer().vocab_size // 8) * 8,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_positions=1024,
        )

    def scaled(self, factor: float) -> BaseRecipe:
        """The recipe with a smaller budget, to try the machinery; the scores will be meaningless."""
        budgets = (
            "clean_tokens",
            "clean_warmup_steps",
            "noisy_steps",
            "noisy_warmup_steps",
            "noisy_episodes",
            "sweep_items",
            "refit_items",
            "final_items",
        )
        small = {name: max(1, round(getattr(self, name) * factor)) for name in budgets}
        return self.model_copy(update=small)


_BETTER: Final = {
    "calc_chain": 0.74,
    "multi_hop": 0.65,
    "string_pipeline": 0.55,
    "ledger": 0.24,
    "dispatch": 0.32,
    "triage": 0.35,
}
_WEAKER_SHARE: Final = 0.6


def _weaker(names: tuple[str, ...]) -> dict[str, float]:
    """Targets where the named families are this model's weak ones and the others its strong ones."""
    return {
        name: round(score * _WEAKER_SHARE, 2) if name in names else score
        for name, score in _BETTER.items()
    }


RECIPES: Final[tuple[BaseRecipe, ...]] = (
    BaseRecipe(
        name="nano",
        hidden_size=96,
        num_layers=3,
        num_heads=3,
        intermediate_size=256,
        targets=_weaker(tuple(name for name in _BETTER if name != "multi_hop")),
        clean_tokens=10_000_000,
        clean_decay_share=0.0,
    ),
    BaseRecipe(
        name="micro",
        hidden_size=160,
        num_layers=5,
        num_heads=5,
        intermediate_size=432,
        targets={**_weaker(()), "multi_hop": 0.40},
        shares={"multi_hop": 0.006},
        clean_tokens=20_000_000,
    ),
)
"""micro is the better base for every family but multi_hop, before and after training, so the choice is a real one: it has
hardly practised multi_hop, and a job does not teach it."""


def recipe(name: str) -> BaseRecipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none.
    """
    for one in RECIPES:
        if one.name == name:
            return one
    raise ConfigError(
        f"no recipe {name!r}; expected one of {', '.join(r.name for r in RECIPES)}; check the spelling"
    )
