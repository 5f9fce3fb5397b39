"""What a pod of a run is asked to be: image, command, and an environment without a secret in it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from nestling.fleet.pods.boot import BOOT_KEY_VARIABLE, BOOT_VARIABLE, Boot
from nestling.fleet.pods.config import RunpodFleet
from nestling.fleet.pods.identity import PodIdentity
from nestling.fleet.pods.wire import WorkSpec
from nestling.fleet.providers.runpod_api import PodRequest
from nestling.fleet.providers.runpod_ladder import Step

__all__ = ["PodRun", "pod_command", "pod_request"]

_WORKER = "nestling.fleet.pods.worker"
_AGAIN_S = 10
"""Between two tries to get ready."""
_END = f"""\
import json, os, time, urllib.request
url = json.loads(os.environ[{BOOT_VARIABLE!r}])["api_url"]
url += "/pods/" + os.environ["RUNPOD_POD_ID"] + "/action"
headers = {{
    "authorization": "Bearer " + os.environ["RUNPOD_API_KEY"],
    "content-type": "application/json",
    "user-agent": "nestling-pod",
}}
while True:
    request = urllib.request.Request(url, data=b'{{"action": "terminate"}}', headers=headers)
    try:
        urllib.request.urlopen(request, timeout=15).close()
    except Exception as error:
        print(error, flush=True)
    time.sleep(20)
"""
"""What `pods.worker` does at its end, for a pod where it cannot be started: the standard library alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRun:
    """What ties pods to one run."""

    run_id: str
    identity: PodIdentity
    spec: WorkSpec
    pins: Mapping[str, str]

    def secret_name(self, pool: str) -> str:
        """Of the account secret that holds the boot key of this run."""
        return f"{pool}_{self.run_id}"


def pod_request(name: str, step: Step, config: RunpodFleet, run: PodRun) -> PodRequest:
    """The request for one pod. Anybody with the account's key can read its environment."""
    boot = Boot(
        name=name,
        address=config.address,
        certificate=run.identity.certificate,
        api_url=config.api_url,
        pins=sorted(run.pins),
        lost_controller_s=config.lost_controller_s,
    )
    return PodRequest(
        name=name,
        image=config.image,
        gpu_id=step.gpu_id,
        gpu_count=step.rung.count,
        cloud=step.rung.cloud,
        data_centers=step.rung.data_centers,
        min_cuda_version=step.rung.min_cuda_version,
        disk_gb=config.disk_gb,
        env={
            BOOT_VARIABLE: msgspec.json.encode(boot).decode(),
            BOOT_KEY_VARIABLE: f"{{{{ RUNPOD_SECRET_{run.secret_name(config.pool)} }}}}",
        },
        command=pod_command(config.install, max(config.boot_s, config.lost_controller_s)),
    )


def pod_command(install: Sequence[str], give_up_s: float = 900.0) -> list[str]:
    """What the container runs: the pinned requirements first, if any, then the worker, if it can be imported.

    Both are tried again and again, a try that hangs is cut off; after `give_up_s` without success the pod ends
    itself, as a container whose command exits is started again and billed on. Needs bash, coreutils and Python.
    """
    ready = f"\"$python\" -c 'import {_WORKER}'"
    if install:
        wanted = " ".join(f"'{requirement}'" for requirement in install)
        ready = f'"$python" -m pip install --no-input {wanted} && {ready}'
    limit_s = max(1, math.ceil(give_up_s))
    return [
        "bash",
        "-c",
        "export python=$(command -v python || command -v python3); "
        f"until timeout -s KILL {limit_s} bash -c {shlex.quote(ready)}; do "
        f'[ $SECONDS -lt {give_up_s:.0f} ] || exec "$python" -I -c {shlex.quote(_END)}; '
        f'sleep {_AGAIN_S}; done; exec "$python" -m {_WORKER}',
    ]
