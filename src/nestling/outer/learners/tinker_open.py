"""Open a Tinker learner from its settings, and find out beforehand what would stop it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, LearnerError
from nestling.outer.config import TinkerConfig
from nestling.outer.learners.tinker import TEMPERATURE, TinkerLearner
from nestling.outer.learners.tinker_calls import Caller
from nestling.outer.learners.tinker_faults import Pause, PauseWatch, TinkerFaultError
from nestling.outer.learners.tinker_prices import Prices, read_prices
from nestling.outer.learners.tinker_service import Model, Service, TinkerService, read_key

__all__ = ["Finding", "open_tinker", "preflight", "refuse_problems"]

logger = logging.getLogger(__name__)

_PREFLIGHT_S: Final = 60.0
_HEARTBEAT_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at before a run."""

    name: str
    state: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""


def open_tinker(
    config: TinkerConfig,
    folder: Path,
    *,
    stop_ids: Sequence[int],
    on_pause: Callable[[Pause], None] | None = None,
) -> TinkerLearner:
    """The learner of a run; reads the key from the environment. Makes no call to the service yet.

    Raises:
        ConfigError: no key, no SDK, or no price although `max_usd` is set.
    """
    key = read_key()
    prices: Prices | None = None
    try:
        prices = read_prices(config.base_model, config.price_file)
    except ConfigError as error:
        if config.max_usd is not None:
            raise
        logger.warning("cost is counted in tokens only: %s", error)
    return TinkerLearner(
        TinkerService(key, config.base_url),
        folder,
        config=config,
        stop_ids=stop_ids,
        prices=prices,
        on_pause=on_pause,
        hidden=(key,),
    )


async def preflight(
    config: TinkerConfig,
    *,
    max_total_tokens: int,
    temperature: float,
    service: Service | None = None,
) -> list[Finding]:
    """Key, SDK, service, model, context, price, in this order; stops at what blocks the rest.

    Costs nothing: no model is loaded. Takes up to a minute when the service does not answer.
    """
    findings: list[Finding] = []
    if temperature != TEMPERATURE:
        findings.append(
            Finding(
                name="temperature",
                state="problem",
                found=f"outer.temperature is {temperature:g}; the service trains at 1",
                fix="set outer.temperature = 1.0",
            )
        )
    try:
        key = read_key()
        findings.append(Finding(name="key", state="ok", found="TINKER_API_KEY is set"))
        used = service or TinkerService(key, config.base_url)
    except ConfigError as error:
        wrong, _, fix = str(error).rpartition("; ")
        return [*findings, Finding(name="Tinker", state="problem", found=wrong, fix=fix)]
    watch = PauseWatch(SystemClock(), secrets=(key,))
    try:
        caller = Caller(watch, SystemClock(), heartbeat_s=_HEARTBEAT_S, secrets=(key,))
        models = await caller.call("get_server_capabilities", _PREFLIGHT_S, used.models())
    except TinkerFaultError as error:
        wrong, _, fix = str(error).rpartition("; ")
        return [*findings, Finding(name="service", state="problem", found=wrong, fix=fix)]
    finally:
        watch.close()
    where = config.base_url or "the hosted service"
    findings.append(Finding(name="service", state="ok", found=f"{where}: {len(models)} models"))
    findings += _model_findings(config, models, max_total_tokens)
    findings.append(await asyncio.to_thread(_price_finding, config))
    return findings


def refuse_problems(findings: Sequence[Finding]) -> None:
    """Raises `LearnerError` with every problem and its fix."""
    lines = [f"{one.name}: {one.found}; {one.fix}" for one in findings if one.state == "problem"]
    if lines:
        raise LearnerError("the Tinker learner cannot start; " + "; ".join(lines))


def _model_findings(
    config: TinkerConfig, models: Sequence[Model], max_total_tokens: int
) -> list[Finding]:
    model = next((one for one in models if one.name == config.base_model), None)
    if model is None:
        family = config.base_model.split("/")[-1].split("-")[0].lower()
        near = [one.name for one in models if family in one.name.lower()] or [
            one.name for one in models
        ]
        fix = f"set learner.base_model to one of: {', '.join(near[:8])}"
        found = f"the service does not offer {config.base_model!r}"
        return [Finding(name="model", state="problem", found=found, fix=fix)]
    if model.trainable is False:
        fix = "choose another learner.base_model"
        found = f"{model.name} can be sampled, not trained"
        return [Finding(name="model", state="problem", found=found, fix=fix)]
    findings = [Finding(name="model", state="ok", found=f"{model.name}, LoRA {config.lora_rank}")]
    if model.max_context is None:
        findings.append(
            Finding(name="context", state="note", found="the service does not say how long it is")
        )
    elif model.max_context < max_total_tokens:
        findings.append(
            Finding(
                name="context",
                state="problem",
                found=f"{model.max_context} tokens; an episode may have {max_total_tokens}",
                fix=f"set outer.max_total_tokens to {model.max_context} or less",
            )
        )
    else:
        findings.append(Finding(name="context", state="ok", found=f"{model.max_context} tokens"))
    return findings


def _price_finding(config: TinkerConfig) -> Finding:
    try:
        prices = read_prices(config.base_model, config.price_file)
    except ConfigError as error:
        wrong, _, fix = str(error).rpartition("; ")
        state: Literal["note", "problem"] = "note" if config.max_usd is None else "problem"
        return Finding(name="price", state=state, found=wrong, fix=fix)
    found = (
        f"USD per million tokens: {prices.prefill:g} prefill, {prices.cached_prefill:g} cached, "
        f"{prices.sample:g} sampled, {prices.train:g} trained"
    )
    return Finding(name="price", state="ok", found=found)
