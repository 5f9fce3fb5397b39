"""What the simulated API refuses before it does anything: bodies, keys, agents, rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from nestling.fleet.runpod_simulator.account import ProblemError, SimulatedTime

__all__ = ["MAX_BODY_BYTES", "RateWindows", "check_agent", "check_create", "read_body"]

MAX_BODY_BYTES: Final = 102_400
_MAX_ENV: Final = 50
_CREATE: Final[Mapping[str, type | tuple[type, ...]]] = {
    "name": str,
    "image": str,
    "gpu": dict,
    "cpu": dict,
    "cloud": str,
    "dataCenterIds": list,
    "disk": int,
    "mounts": dict,
    "ports": list,
    "env": dict,
    "entrypoint": list,
    "cmd": list,
    "args": str,
    "registry": (str, type(None)),
    "startSsh": bool,
    "startJupyter": bool,
    "globalNetworking": bool,
    "templateId": str,
    "locked": bool,
}
_GPU: Final[Mapping[str, type | tuple[type, ...]]] = {
    "id": str,
    "count": int,
    "minCudaVersion": str,
    "allowedCudaVersions": list,
    "minRamPerGpu": int,
    "minVcpuCountPerGpu": int,
}
_REFUSED_AGENTS: Final = ("python-urllib", "java/")


class RateWindows:
    """Three windows at once; every authenticated request counts, also one that fails."""

    def __init__(self, time: SimulatedTime, quotas: Mapping[str, tuple[int, int]]) -> None:
        self._time = time
        self._quotas = dict(quotas)
        """Name to quota and seconds."""
        self._started = dict.fromkeys(quotas, time.elapsed())
        self._used = dict.fromkeys(quotas, 0)
        self.num_limited = 0

    def count(self) -> tuple[dict[str, str], int | None]:
        """Headers for the answer, and seconds to wait when a window is used up."""
        now = self._time.elapsed()
        policy, state, wait_s = [], [], 0
        for name, (quota, seconds) in self._quotas.items():
            if now - self._started[name] >= seconds:
                self._started[name], self._used[name] = now, 0
            self._used[name] += 1
            resets_s = max(1, round(self._started[name] + seconds - now))
            left = quota - self._used[name]
            policy.append(f'"{name}";q={quota};w={seconds}')
            state.append(f'"{name}";r={max(left, 0)};t={resets_s}')
            if left < 0:
                wait_s = max(wait_s, resets_s)
        if wait_s:
            self.num_limited += 1
        headers = {"ratelimit-policy": ", ".join(policy), "ratelimit": ", ".join(state)}
        return headers, wait_s or None


def check_agent(agent: str) -> None:
    """The content network's own refusal, which is no JSON."""
    if not agent or agent.lower().startswith(_REFUSED_AGENTS):
        raise PermissionError("error 1010")


def read_body(data: bytes) -> dict[str, Any]:
    """A JSON object; `ProblemError` otherwise."""
    try:
        body = json.loads(data or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ProblemError(400, "The body is not a JSON object.")
    return body


def check_create(body: Mapping[str, Any], templates: Mapping[str, Any]) -> None:
    """Raises `ProblemError` as POST /v2/pods does."""
    wrong = _wrong_fields(body, _CREATE, "")
    required = ["name"] if "templateId" in body else ["name", "image"]
    missing = [name for name in required if name not in body]
    if isinstance(body.get("gpu"), dict):
        wrong += _wrong_fields(body["gpu"], _GPU, "gpu.")
        missing += [] if "id" in body["gpu"] else ["gpu.id"]
    if missing:
        # As seen: then valid fields are listed as unexpected too, and first.
        wrong += [f"unexpected property {name}" for name in sorted(body) if name in _CREATE]
        wrong += [f"missing required property {name}" for name in missing]
    if len(body.get("env") or {}) > _MAX_ENV:
        wrong.append(f"env: at most {_MAX_ENV}")
    if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
        wrong.append("cloud: unknown value")
    if wrong:
        raise ProblemError(422, "The body does not match the schema.", wrong)
    _check_choices(body)
    if "templateId" in body and body["templateId"] not in templates:
        raise ProblemError(404, "Template not found.")


def _check_choices(body: Mapping[str, Any]) -> None:
    """What excludes one another."""
    if ("gpu" in body) == ("cpu" in body):
        raise ProblemError(400, "Give exactly one of gpu and cpu.")
    if "gpu" not in body:
        raise ProblemError(400, "There are no instances currently available.")
    if "minCudaVersion" in body["gpu"] and "allowedCudaVersions" in body["gpu"]:
        raise ProblemError(400, "minCudaVersion and allowedCudaVersions exclude one another.")
    mounts = body.get("mounts") or {}
    if "network" in mounts and "persistent" in mounts:
        raise ProblemError(400, "Mounts network and persistent exclude one another.")


def _wrong_fields(
    body: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]], prefix: str
) -> list[str]:
    wrong = []
    for name, value in body.items():
        kind = known.get(name)
        if kind is None:
            wrong.append(f"unexpected property {prefix}{name}")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wrong.append(f"{prefix}{name}: wrong type")
    return wrong
