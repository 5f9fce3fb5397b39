"""The folder of one prime-rl run: the job's package, rl.toml, and where prime-rl writes.

The job's files are put there byte for byte. `taskset.id` names a package of ours that passes on what `environment`
exports: its name is the job's own, so it can neither hide a task set that verifiers ships nor be another job's.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from nestling.core.errors import ConfigError
from nestling.families.public_package import public_files
from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.inner.trainer import TrainRequest
from nestling.jobs.rl_toml import RlRun, render_rl_toml

__all__ = ["RunFolder"]

_RUN: Final = "run"
_PASSES_ON: Final = '''"""What the job's package exports, under a name of its own."""

import environment

__all__ = list(environment.__all__)
globals().update({name: getattr(environment, name) for name in __all__})
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of one run; `prepare` makes them, `remove` takes them away."""

    root: Path
    package_name: str

    @classmethod
    def prepare(cls, root: Path, request: TrainRequest, config: PrimeRlConfig) -> RunFolder:
        """A fresh folder: whatever an earlier run left there is removed, as `rl` refuses a used one."""
        shutil.rmtree(root, ignore_errors=True)
        made = cls(root=root.absolute(), package_name=f"job_{request.bundle.job_hash[:16]}")
        for name, content in _package_files(request, made.package_name).items():
            path = made.package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        run = RlRun(
            name=_RUN,
            package=made.package_name,
            num_train_gpus=config.train_gpus,
            num_infer_gpus=config.infer_gpus,
            gpu_memory_utilization=config.gpu_memory,
            output_dir=str(made.root),
            ports=_free_ports(),
        )
        model = str(request.base_folder.absolute())
        made.toml.write_text(render_rl_toml(request.manifest, model, run), encoding="utf-8")
        return made

    @property
    def package(self) -> Path:
        """On PYTHONPATH of the run."""
        return self.root / "package"

    @property
    def toml(self) -> Path:
        """The written configuration."""
        return self.root / "rl.toml"

    @property
    def output(self) -> Path:
        """What `rl` itself says."""
        return self.root / "rl.log"

    @property
    def run(self) -> Path:
        """prime-rl's own folder: configs, logs, metrics.jsonl, rollouts, broadcasts."""
        return self.root / _RUN

    def remove(self) -> None:
        """Gigabytes, once the weights are out."""
        shutil.rmtree(self.root, ignore_errors=True)


def _package_files(request: TrainRequest, package: str) -> Mapping[str, bytes]:
    files = {
        name: content
        for name, content in request.bundle.files.items()
        if name.split("/")[0] not in ("tools", package)
    }
    files |= {f"tools/{name}": content for name, content in public_files(request.family).items()}
    files[f"{package}/__init__.py"] = _PASSES_ON.encode()
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise ConfigError(f"job file {name!r}; expected a relative path without ..")
    return files


def _free_ports() -> tuple[int, int, int]:
    """Three that nobody listens on now; several runs may share a machine."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    first, second, third = (one.getsockname()[1] for one in taken)
    for one in taken:
        one.close()
    return first, second, third
