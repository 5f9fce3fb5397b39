"""The `[fleet]` table of a recipe that runs jobs on Runpod pods."""

from __future__ import annotations

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from nestling.core.frozen import Frozen
from nestling.fleet.budget import load_prices
from nestling.fleet.pods.boot import API_URL

__all__ = ["Rung", "RunpodFleet"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_PINNED = re.compile(r"\S+==\S+|\S+ @ git\+https://\S+@[0-9a-f]{40}(#\S+)?")


class Rung(Frozen):
    """One step of the preference ladder: a kind of machine and the most it may cost."""

    gpu: str
    """A machine of the price table that names its GPU, for example `a5000`."""
    count: int = Field(1, ge=1, le=16)
    """GPUs of one pod."""
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    """Kind of host; community hosts are cheaper and less certain."""
    data_centers: tuple[str, ...] = ()
    """Upper-case ids; empty: anywhere. Anything narrower makes refusals likelier."""
    max_usd_per_hour: float = Field(gt=0)
    """For a whole pod; a dearer one is not taken."""
    min_cuda_version: str | None = Field(None, pattern=r"^\d+\.\d+$")
    """Oldest CUDA version the host may have; none: any."""

    @field_validator("gpu")
    @classmethod
    def _is_priced(cls, gpu: str) -> str:
        known = sorted(name for name, price in load_prices().items() if price.gpu)
        if gpu not in known:
            raise ValueError(
                f"no GPU {gpu!r} in the price table; expected one of {', '.join(known)}"
            )
        return gpu


class RunpodFleet(Frozen):
    """Workers on rented GPU pods; needs a key in RUNPOD_API_KEY and the extra `runpod`."""

    kind: Literal["runpod"] = "runpod"
    workers: int = Field(16, ge=1, le=256)
    """Most pods at a time; they start when jobs wait and end when idle."""
    ladder: tuple[Rung, ...] = Field(min_length=1)
    """In order of preference."""
    image: str
    """Container image, pinned: `name@sha256:<64 hex>`."""
    install: tuple[str, ...] = ()
    """Requirements to install at boot, each `name==version` or `name @ git+https://...@<40 hex>`."""
    pins: dict[str, str] = Field(default_factory=dict)
    """Package to its exact version or git revision, checked in the pod before any work."""
    disk_gb: int = Field(40, ge=1, le=2000)
    """Container disk of a pod."""
    address: str
    """`https://host:port` under which pods reach this controller."""
    listen: str = "0.0.0.0:8443"
    """`host:port` that the controller listens on."""
    pool: str = Field("nestling", pattern=r"^[a-z][a-z0-9]{1,19}$")
    """First part of every pod's name: what `fleet down --all` ends."""
    api_url: str = API_URL
    """Where the account is asked; a loopback address for the simulated one."""
    max_usd_per_hour: float = Field(8.0, gt=0)
    """Of all pods together."""
    max_usd: float | None = Field(None, gt=0)
    """Of all pods of the run together, boots and idling included; None: no cap."""
    idle_s: float = Field(300.0, gt=0)
    """A pod without work for so long is ended."""
    create_s: float = Field(60.0, gt=0)
    """Time limit of the request that creates a pod."""
    boot_s: float = Field(600.0, gt=0)
    """From the request to the first word of the worker."""
    ready_s: float = Field(600.0, gt=0)
    """From its first word to ready for jobs: models are loaded."""
    heartbeat_s: float = Field(60.0, gt=0)
    """A worker that is not heard for so long is dead."""
    max_age_s: float = Field(86400.0, gt=0)
    """A pod older than this ends itself."""
    lost_controller_s: float = Field(900.0, gt=0)
    """A pod that cannot reach any controller for so long ends itself."""
    tick_s: float = Field(12.0, gt=0)
    """Between looks at the list of pods."""
    cool_s: float = Field(60.0, ge=0)
    """How long a rung that was refused is left alone."""
    grace_s: float = Field(90.0, ge=0)
    """How long a pod may be missing from the list although it was made, or the reverse."""
    patience_s: float = Field(3600.0, gt=0)
    """How long there may be no pod at all because none can be had."""

    @property
    def machine(self) -> str:
        """The dearest rung's name in the price table, so that reservations are upper bounds."""
        prices = load_prices()
        return max((rung.gpu for rung in self.ladder), key=lambda gpu: prices[gpu].usd_per_hour)

    @field_validator("image")
    @classmethod
    def _is_pinned(cls, image: str) -> str:
        if not _DIGEST.fullmatch(image):
            raise ValueError(
                f"image {image!r} is not pinned; expected name@sha256:<64 hex>, as a tag may change "
                "and hosts keep old copies; `docker buildx imagetools inspect` shows the digest"
            )
        return image

    @field_validator("install")
    @classmethod
    def _are_pinned(cls, install: tuple[str, ...]) -> tuple[str, ...]:
        for one in install:
            if not _PINNED.fullmatch(one) or any(char in one for char in "'\"`$;|&\n"):
                raise ValueError(
                    f"requirement {one!r} is not pinned; expected name==version or "
                    "name @ git+https://host/repo@<40 hex>"
                )
        return install

    @field_validator("api_url", "address")
    @classmethod
    def _is_safe(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise ValueError(f"{url!r}; expected https:// (plain http only to this machine)")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if urlsplit(self.address).scheme != "https":
            raise ValueError(f"address {self.address!r}; expected https://host:port")
        dear = min(rung.max_usd_per_hour for rung in self.ladder)
        if dear > self.max_usd_per_hour:
            raise ValueError(
                f"max_usd_per_hour = {self.max_usd_per_hour:g} allows not one pod: the cheapest rung "
                f"may cost {dear:g}; raise it or lower the rung's max_usd_per_hour"
            )
        return self
