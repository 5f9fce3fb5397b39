"""What a simulated Runpod account is like and what goes wrong in it, as a TOML or JSON file.

boot_s = 120
credit_usd = 25.0

[[stock]]
gpu = "NVIDIA RTX A5000"
count = 4

[[request]]              # what goes wrong with requests
route = "create"
nth = [2, 5]
do = "reply_lost"

[[pod]]                  # what goes wrong with pods, by the order in which they were made
pods = [3]
do = "freeze"
after_s = 60
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.fleet.budget import load_prices

__all__ = ["PodFault", "RequestFault", "Route", "Script", "Stock", "load_script"]

Route = Literal["create", "list", "get", "delete", "action", "catalog", "secrets", "logs", "other"]


class Stock(Frozen):
    """Machines of one kind in one place."""

    gpu: str
    """Id in the catalog."""
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    data_center: str = "EU-RO-1"
    count: int = Field(8, ge=0)
    usd_per_hour: float = Field(0.3, gt=0)
    memory_gb: int = Field(24, ge=1)
    shown: Literal["NONE", "LOW", "MEDIUM", "HIGH"] | None = None
    """What the catalog says whatever there is; None: what there was `catalog_lag_s` ago."""


class RequestFault(Frozen):
    """Something that happens to requests of one route."""

    route: Route
    nth: tuple[int, ...] = ()
    """Which requests of the route, from 1; empty: all in the time below."""
    after_s: float = Field(0.0, ge=0)
    """From this simulated second on."""
    for_s: float | None = Field(None, gt=0)
    """For so long; None: for ever."""
    do: Literal["reply_lost", "not_done", "status", "html", "stall", "stock_out"]
    """reply_lost: done, but the caller never learns; not_done: looks the same, nothing was done."""
    how: Literal["timeout", "closed", "500", "502"] = "closed"
    """What the caller sees of `reply_lost` and `not_done`."""
    status: int = Field(503, ge=400, le=599)
    seconds: float = Field(30.0, gt=0)
    """Of a stall or timeout, in simulated time."""


class PodFault(Frozen):
    """Something that happens to pods, counted in the order in which they were made."""

    pods: tuple[int, ...]
    do: Literal[
        "slow",
        "early_running",
        "no_runtime",
        "error",
        "empty_image",
        "install_hangs",
        "freeze",
        "kill",
        "crash_loop",
        "exit",
        "vanish",
        "list_lag",
        "get_lag",
        "delete_lag",
        "lock",
    ]
    """slow: boots `seconds` longer; early_running: RUNNING from the start, runtime later; no_runtime:
    RUNNING for ever without one; error: ends its boot in ERROR; empty_image: its Python has the
    standard library only, whatever is installed; install_hangs: pip never ends; freeze: its worker stands still;
    kill: its worker is killed and the container restarted; crash_loop: each start is killed; exit:
    EXITED; vanish: gone without notice; lags: seen late or too long; lock: cannot be ended."""
    after_s: float = Field(0.0, ge=0)
    """After its worker was started."""
    seconds: float = Field(60.0, gt=0)


class Script(Frozen):
    """A whole account."""

    boot_s: float = Field(120.0, ge=0)
    """From request to worker started: a third PROVISIONING, the rest STARTING."""
    boot_spread: float = Field(0.2, ge=0, lt=1)
    """Each pod takes up to this share more or less."""
    credit_usd: float = 1000.0
    catalog_lag_s: float = Field(60.0, ge=0)
    per_minute: int = Field(120, ge=1)
    per_hour: int = Field(4000, ge=1)
    per_day: int = Field(50_000, ge=1)
    exempt: bool = False
    """No rate limits and no headers about them."""
    list_lag_s: float = Field(0.0, ge=0)
    """A new pod is missing from the list for so long."""
    page: int = Field(100, ge=1, le=1000)
    """Most pods that a page really holds."""
    seed: int = 0
    stock: tuple[Stock, ...] = ()
    """Empty: eight of each GPU of the price table in each cloud."""
    request: tuple[RequestFault, ...] = ()
    pod: tuple[PodFault, ...] = ()

    def machines(self) -> tuple[Stock, ...]:
        """The stock at the start."""
        return self.stock or _usual_stock()


def load_script(path: Path | None) -> Script:
    """Read a script; `ConfigError` says what is wrong with it. None: an account without faults."""
    if path is None:
        return Script()
    try:
        text = path.read_text("utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return Script.model_validate_json(json.dumps(document))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(
            f"fault script {path}: {error}; expected TOML or JSON as in docs/runpod.md"
        ) from error


def _usual_stock() -> tuple[Stock, ...]:
    found = []
    for price in load_prices().values():
        if price.gpu:
            found.append(Stock(gpu=price.gpu, usd_per_hour=price.usd_per_hour))
            if price.community_usd_per_hour:
                usd = price.community_usd_per_hour
                found.append(
                    Stock(gpu=price.gpu, cloud="COMMUNITY", data_center="US-TX-3", usd_per_hour=usd)
                )
    return tuple(found)
