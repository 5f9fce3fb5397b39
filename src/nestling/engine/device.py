"""Devices by name, for packages that know no torch."""

from __future__ import annotations

import torch

from nestling.core.errors import ConfigError
from nestling.engine import stack_plan
from nestling.engine.stack_plan import Precision

__all__ = ["describe", "expand", "free_bytes", "set_precision", "use"]


def expand(names: tuple[str, ...]) -> tuple[str, ...]:
    """Device names with `cuda` replaced by every GPU.

    Raises:
        ConfigError: a GPU that is not there.
    """
    count = torch.cuda.device_count()
    found: list[str] = []
    for name in names:
        if name == "cpu":
            found.append(name)
            continue
        wanted = [f"cuda:{i}" for i in range(count)] if name == "cuda" else [name]
        if not wanted or int(wanted[-1].removeprefix("cuda:")) >= count:
            raise ConfigError(
                f"device {name!r}, but this machine has {count} usable GPUs; expected cpu, or cuda:0 "
                "up to one less than their number; install a torch with CUDA, or use cpu"
            )
        found += wanted
    return tuple(dict.fromkeys(found))


def free_bytes(name: str) -> int:
    """Memory that may be taken; see `stack_plan.SPARE`."""
    return stack_plan.free_bytes(torch.device(name))


def describe(name: str) -> str:
    """A device's model and the torch that drives it: what may change rounding."""
    device = torch.device(name)
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{model} torch {torch.__version__}"


def use(name: str) -> None:
    """Make a GPU the one that this process works on; streams, events and graphs belong to it from then on."""
    if name.startswith("cuda"):
        torch.cuda.set_device(name)


def set_precision(precision: Precision) -> None:
    """Let float32 matrix products of this process use the GPU's TensorFloat-32, or forbid it."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
