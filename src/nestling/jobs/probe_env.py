"""Start the environment that a probe plays against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nestling.core.clock import Clock
from nestling.families.public_package import public_files
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_client import EnvStarter, open_env
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.manifest import JobManifest
from nestling.jobs.rollout_env import RolloutEnv

__all__ = ["PROBE_LIMITS", "EnvOpener", "JailedOpener"]

PROBE_LIMITS = JailLimits(cpu_s=120, load_s=60.0, call_s=20.0, life_s=120.0)
"""Tighter than in training: a probe plays a few hundred short rollouts."""


class EnvOpener(Protocol):
    """How to start a job's environment."""

    def __call__(self, bundle: Bundle, family: str, manifest: JobManifest) -> RolloutEnv:
        """A loaded environment; the caller closes it.

        Raises:
            JailError: it does not start, or its package does not load.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JailedOpener:
    """In a jailed child, the only place where agent code may run."""

    jail: Jail = field(default_factory=Jail)
    starter: EnvStarter | None = None
    """A zygote for warm starts."""
    limits: JailLimits = PROBE_LIMITS
    clock: Clock | None = None

    def __call__(self, bundle: Bundle, family: str, manifest: JobManifest) -> RolloutEnv:
        """See `EnvOpener`."""
        return open_env(
            bundle.files,
            public_files(family),
            self.limits,
            jail=self.jail,
            starter=self.starter,
            env_args=manifest.env,
            clock=self.clock,
        )
