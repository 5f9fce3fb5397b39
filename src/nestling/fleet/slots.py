"""Which cores, which GPU and how much memory each worker of this machine has.

Without GPUs a worker is `threads` cores. With GPUs a worker is a share of one: as many jobs as fit
into its memory, or as many as were asked for, and the machine's cores are dealt out among them. A
worker sees its own GPU only, as the first device, and starts `threads` threads.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from nestling.core.errors import ConfigError, FleetError
from nestling.core.frozen import Frozen

__all__ = ["Gpu", "Slot", "deal", "find_gpus", "read_smi", "thread_settings"]

_SYSTEM_GIB = 1.0
"""Of a GPU's memory: driver, fragmentation and what the screen takes."""
_SMI_TIMEOUT_S = 20.0


class Gpu(Frozen):
    """One GPU of this machine, found or given."""

    memory_gib: float = Field(gt=0)
    """Memory of the device."""
    jobs: int = Field(0, ge=0, le=4096)
    """Jobs at the same time; 0: as many as fit into its memory."""
    device: str = Field("", pattern=r"^[A-Za-z0-9-]*$")
    """Index or UUID for CUDA_VISIBLE_DEVICES; empty: its place in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one worker has."""

    threads: int
    cores: tuple[int, ...] = ()
    """Cores that it may run on; empty: all."""
    gpu: str = ""
    """CUDA_VISIBLE_DEVICES; empty: what the controller has."""

    def environment(self) -> dict[str, str]:
        """Variables of its process; set before anything numeric is imported."""
        if not self.gpu:
            return thread_settings(self.threads)
        # By bus, as nvidia-smi counts; CUDA's own order puts the fastest first.
        shown = {"CUDA_VISIBLE_DEVICES": self.gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return thread_settings(self.threads) | shown


def thread_settings(threads: int) -> dict[str, str]:
    """Variables that numeric libraries read when they are imported."""
    names = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "RAYON_NUM_THREADS",
    )
    return dict.fromkeys(names, str(threads))


def deal(
    cores: Sequence[int],
    *,
    gpus: Sequence[Gpu] = (),
    workers: int = 0,
    threads: int = 1,
    gpu_job_gib: float = 4.0,
    pin: bool = False,
) -> list[Slot]:
    """The slots of a machine, in the order in which they are filled: GPUs take turns.

    Args:
        cores: numbers of the cores that may be used.
        gpus: what there is; empty: slots on cores alone.
        workers: how many; 0: one per `threads` cores, or all that the GPUs have room for.
        threads: of each worker.
        gpu_job_gib: GPU memory that one job needs, where a GPU does not say how many jobs.
        pin: keep each worker on cores of its own; for a machine that does nothing else.

    Raises:
        ConfigError: a GPU is too small for one job, more workers than the GPUs take, or cores are
            missing for pinned workers.
    """
    places = _gpu_places(gpus, gpu_job_gib)
    if gpus and workers > len(places):
        raise ConfigError(
            f"fleet.workers = {workers} on {len(gpus)} GPUs with room for {len(places)} jobs; "
            f"expected at most {len(places)}; lower it, or give the GPUs more jobs"
        )
    count = workers or (len(places) if gpus else max(1, len(cores) // threads))
    if pin and count * threads > len(cores):
        raise ConfigError(
            f"fleet.pin_cores with {count} workers of {threads} threads needs {count * threads} "
            f"cores; expected at most the {len(cores)} that this process may use; lower "
            f"fleet.workers or fleet.threads, or set fleet.pin_cores to false"
        )
    return [
        Slot(
            threads=threads,
            cores=tuple(cores[number * threads : (number + 1) * threads]) if pin else (),
            gpu=places[number] if gpus else "",
        )
        for number in range(count)
    ]


def find_gpus() -> list[Gpu]:
    """The GPUs that `nvidia-smi` lists; none where it is not installed.

    Raises `FleetError` when it is there and fails, as a machine with a broken driver must not
    quietly become one without GPUs.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 (a fixed command)
            query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FleetError(
            f"{program} failed: {error}; expected a list of GPUs; repair the driver, or name the "
            f"GPUs in fleet.gpus"
        ) from error
    return read_smi(done.stdout)


def read_smi(text: str) -> list[Gpu]:
    """The GPUs of `nvidia-smi --query-gpu=uuid,memory.total` without header and units (MiB)."""
    try:
        return [
            Gpu(device=uuid.strip(), memory_gib=float(mib) / 1024)
            for uuid, mib in csv.reader(text.splitlines())
        ]
    except ValueError as error:
        raise FleetError(
            f"nvidia-smi said {text[:200]!r}; expected lines of UUID and memory in MiB; name the "
            f"GPUs in fleet.gpus"
        ) from error


def _gpu_places(gpus: Sequence[Gpu], gpu_job_gib: float) -> list[str]:
    """The device of every job that the GPUs have room for, one GPU after the other in turns."""
    rooms = []
    for number, gpu in enumerate(gpus):
        device = gpu.device or str(number)
        usable_gib = max(0.0, gpu.memory_gib - _SYSTEM_GIB)
        jobs = gpu.jobs or int(usable_gib // gpu_job_gib)
        if jobs == 0:
            raise ConfigError(
                f"GPU {device} has {gpu.memory_gib:g} GiB, of which {usable_gib:g} are usable; "
                f"expected room for one job of {gpu_job_gib:g} GiB; lower fleet.gpu_job_gib, say "
                f"how many jobs it takes, or leave this GPU out"
            )
        rooms.append((device, jobs))
    most = max((jobs for _, jobs in rooms), default=0)
    return [device for turn in range(most) for device, jobs in rooms if turn < jobs]
