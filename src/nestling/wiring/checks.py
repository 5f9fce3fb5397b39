"""What a recipe may not ask for, found before anything is started."""

from __future__ import annotations

from nestling.config import RunConfig
from nestling.core.errors import ConfigError
from nestling.families.registry import get
from nestling.fleet.budget import load_prices
from nestling.wiring.agents import agent_folder

__all__ = [
    "check_names",
    "refuse_distant_models",
    "refuse_distant_stacks",
    "refuse_unjailed",
]


def refuse_unjailed(config: RunConfig) -> None:
    """prime-rl has the job's code in its own processes: on a rented pod, or because somebody says so."""
    if config.inner.trainer != "prime_rl":
        return
    if config.fleet.kind != "runpod" and not config.inner.prime_rl.unjailed:
        raise ConfigError(
            "inner.trainer = 'prime_rl' runs agent-written code outside the jail, with the rights of this user; expected "
            "fleet.kind = 'runpod', where a machine does nothing else; or, on a machine that may be lost, set "
            "inner.prime_rl.unjailed = true (docs/prime-rl.md)"
        )
    if config.models.shipped:
        raise ConfigError(
            "models.shipped = true with inner.trainer = 'prime_rl'; expected open models only, as prime-rl knows no "
            "others; set models.shipped = false and name them in models.extra"
        )


def refuse_distant_stacks(config: RunConfig) -> None:
    """ConfigError when the workers of a stacked recipe would be on other machines."""
    if config.inner.trainer == "stacked" and config.fleet.kind != "local":
        raise ConfigError(
            f"inner.trainer = 'stacked' with fleet.kind = {config.fleet.kind!r}; expected fleet.kind = "
            "'local', as a stack serves the workers of its own machine; or set inner.trainer to embedded"
        )


def refuse_distant_models(config: RunConfig) -> None:
    """ConfigError when models would be kept on other machines."""
    if config.inner.keep_models and config.fleet.kind != "local":
        raise ConfigError(
            f"inner.keep_models = true with fleet.kind = {config.fleet.kind!r}; expected false, as models stay where "
            "they are trained, on machines that do not keep them; or set fleet.kind to local"
        )


def check_names(config: RunConfig) -> None:
    """Refuse what a recipe may not ask for, before anything is started.

    Raises:
        ConfigError: a family, an agent or a machine type is unknown, or settings do not go together.
    """
    refuse_unjailed(config)
    refuse_distant_stacks(config)
    refuse_distant_models(config)
    for family in (*config.families.training, *config.families.held_out):
        get(family)
    agent_folder(config.agent.model)
    prices = load_prices()
    if config.fleet.machine not in prices:
        raise ConfigError(
            f"fleet.machine = {config.fleet.machine!r} has no price; expected one of "
            f"{', '.join(sorted(prices))}; choose one, or add it to the price table"
        )
