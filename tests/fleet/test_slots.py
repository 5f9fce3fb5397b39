"""Cores and GPUs dealt out to workers, and real workers that have what they were dealt."""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.config import LocalFleet, load_recipe
from nestling.core.errors import ConfigError, FleetError
from nestling.fleet.providers.local import cores_here
from nestling.fleet.slots import Gpu, deal, find_gpus, read_smi

EIGHT = tuple(range(8))


def test_cores_without_gpus() -> None:
    assert len(deal(EIGHT)) == 8
    assert len(deal(EIGHT, threads=3)) == 2
    assert len(deal((0,), threads=4)) == 1
    assert len(deal(EIGHT, workers=20)) == 20
    pinned = deal((1, 3, 5, 7), threads=2, pin=True)
    assert [slot.cores for slot in pinned] == [(1, 3), (5, 7)]
    assert all("CUDA_VISIBLE_DEVICES" not in slot.environment() for slot in pinned)
    assert pinned[0].environment()["OMP_NUM_THREADS"] == "2"
    with pytest.raises(ConfigError, match="needs 16 cores"):
        deal(EIGHT, workers=8, threads=2, pin=True)


def test_jobs_per_gpu_by_number_and_by_memory() -> None:
    dealt = deal(EIGHT, gpus=(Gpu(memory_gib=141.0, jobs=3), Gpu(memory_gib=24.0, device="GPU-b")))
    # 23 of the second one's 24 GiB are usable: five jobs of 4 GiB.
    assert [slot.gpu for slot in dealt] == ["0", "GPU-b"] * 3 + ["GPU-b"] * 2
    environment = dealt[1].environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert len(deal(EIGHT, gpus=(Gpu(memory_gib=141.0),), gpu_job_gib=70.0)) == 2
    assert [slot.gpu for slot in deal(EIGHT, gpus=(Gpu(memory_gib=80),) * 8, workers=3)] == [
        "0",
        "1",
        "2",
    ]
    with pytest.raises(ConfigError, match="room for 2 jobs"):
        deal(EIGHT, gpus=(Gpu(memory_gib=10.0),), workers=3)
    with pytest.raises(ConfigError, match="GPU 0 has 4 GiB, of which 3 are usable"):
        deal(EIGHT, gpus=(Gpu(memory_gib=4.0),))


@settings(max_examples=60, deadline=None, database=None)
@given(
    gpus=st.lists(st.builds(Gpu, memory_gib=st.floats(6, 200), jobs=st.integers(0, 9)), max_size=9),
    job_gib=st.floats(0.5, 5.0),
)
def test_no_gpu_has_more_jobs_than_its_memory_or_its_number_allows(
    gpus: list[Gpu], job_gib: float
) -> None:
    dealt = deal(EIGHT, gpus=gpus, gpu_job_gib=job_gib)
    found = Counter(slot.gpu for slot in dealt)
    if not gpus:
        assert len(dealt) == 8
        return
    for number, gpu in enumerate(gpus):
        jobs = found[str(number)]
        assert jobs == gpu.jobs if gpu.jobs else jobs * job_gib <= gpu.memory_gib - 1.0
        assert jobs >= 1
    # The first workers are spread over all GPUs.
    assert len({slot.gpu for slot in dealt[: len(gpus)]}) == len(gpus)


def test_recipe_takes_gpus_as_values() -> None:
    config = load_recipe(None, ["fleet.gpus=[{memory_gib=140, jobs=4}]", "fleet.gpu_job_gib=2"])
    assert isinstance(config.fleet, LocalFleet)
    assert config.fleet.gpus == (Gpu(memory_gib=140, jobs=4),)
    assert load_recipe(None, ["fleet.gpus=auto"]).fleet.gpus == "auto"
    with pytest.raises(ConfigError, match="memory_gib"):
        load_recipe(None, ["fleet.gpus=[{memory_gib=-1}]"])


def test_nvidia_smi_is_read_and_a_broken_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_smi("GPU-5b7c, 143771\nGPU-11aa, 24576\n")
    assert [(gpu.device, round(gpu.memory_gib, 1)) for gpu in found] == [
        ("GPU-5b7c", 140.4),
        ("GPU-11aa", 24.0),
    ]
    with pytest.raises(FleetError, match="name the GPUs"):
        read_smi("No devices were found")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(FleetError, match="repair the driver"):
        find_gpus()
    program.write_text("#!/bin/sh\necho 'GPU-1, 81559'\n")
    assert [gpu.device for gpu in find_gpus()] == ["GPU-1"]


async def test_real_workers_have_their_gpu_threads_and_cores(fleet) -> None:
    core = cores_here()[0]
    gpus = (Gpu(memory_gib=140, jobs=1), Gpu(memory_gib=140, jobs=1, device="GPU-b"))
    dealt = deal((core,) * 6, gpus=gpus, threads=3, pin=True)
    async with fleet(size=2, slots=dealt) as room:
        seen = {}
        while len(seen) < 2:
            record = await room.do("hardware")
            seen[record.worker] = record.result
    for number, device in enumerate(("0", "GPU-b")):
        assert seen[f"cpu-{number}"] == {
            "CUDA_VISIBLE_DEVICES": device,
            "OMP_NUM_THREADS": "3",
            "cores": [core],
        }
    assert os.sched_getaffinity(0) == set(cores_here())  # the controller keeps its own
