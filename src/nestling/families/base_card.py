"""The model card of a built base model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nestling.families.base_recipe import BaseRecipe
from nestling.families.demonstrations import ErrorRates

__all__ = ["LICENCE", "render_card", "wilson"]

LICENCE = "Apache-2.0"
_Z95 = 1.959964


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share of n trials."""
    center = share + _Z95**2 / (2 * n)
    half = _Z95 * math.sqrt(share * (1 - share) / n + _Z95**2 / (4 * n * n))
    scale = 1 + _Z95**2 / n
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def render_card(
    recipe: BaseRecipe,
    *,
    command: str,
    params: int,
    clean_tokens: int,
    noisy_tokens: int,
    noise: Mapping[str, float],
    scores: Mapping[str, float],
    greedy: Mapping[str, float],
    machine: str,
) -> str:
    """README.md of the model folder; scores are those of the saved weights."""
    rates = ErrorRates()
    listed = ", ".join(f"{name} {getattr(rates, name)}" for name in ErrorRates.__slots__)
    n = recipe.final_items
    rows = "\n".join(
        f"| {name} | {scores[name]:.3f} | {low:.3f} to {high:.3f} | {_aim(recipe, name)} "
        f"| {noise[name]:.2f} | {greedy[name]:.3f} |"
        for name, (low, high) in ((name, wilson(scores[name], n)) for name in recipe.targets)
    )
    return f"""---
license: apache-2.0
pipeline_tag: text-generation
---
# {recipe.name}

A decoder of {params:,} parameters that calls tools in six synthetic families, with errors on purpose: it
is a starting point for reinforcement learning, not a useful model. Llama layout, {recipe.num_layers} layers of
width {recipe.hidden_size}, closed vocabulary of {recipe.model_config_of().vocab_size} places, byte fallback.

## Score before any training
Temperature 1, {n} fresh items per family, exact answers only; "greedy" shows the skill below the noise.{_limits(recipe)}

| family | score | 95 % interval | aimed at | noise z | greedy |
| --- | --- | --- | --- | --- | --- |
{rows}

## How it was made
- Command: `{command}` on {machine}; seed {recipe.seed}.
- Data: random items of the six families, drawn {_law(recipe)}, each solved by the families' own solvers. No other text.
- Stage 1: {clean_tokens:,} tokens without errors, batches of {recipe.clean_batch_episodes} episodes, AdamW, rate
  {recipe.clean_lr:g}, warm-up {recipe.clean_warmup_steps} steps, linear decay over the last
  {recipe.clean_decay_share:.0%} of the steps.
- Stage 2: {noisy_tokens:,} tokens with errors: {recipe.noisy_steps} steps of {recipe.noisy_batch_episodes} episodes, rate
  {recipe.noisy_lr:g} with decay. Rates at z = 1: {listed}. z was searched per family on the model itself.
- Licence: {LICENCE}, weights and data generator alike.
"""


def _aim(recipe: BaseRecipe, name: str) -> str:
    target = f"{recipe.targets[name]:.2f}"
    return f"at most {target}" if name in recipe.limited else target


def _limits(recipe: BaseRecipe) -> str:
    if not recipe.limited:
        return ""
    return (
        f"\nRarely practised, so that skill itself is limited: {', '.join(sorted(recipe.limited))}."
    )


def _law(recipe: BaseRecipe) -> str:
    if not recipe.shares:
        return "evenly"
    named = ", ".join(f"{name} {share:g} times" for name, share in sorted(recipe.shares.items()))
    return f"{named} as often as the others"
