"""What a person may set about prime-rl."""

from __future__ import annotations

from pydantic import Field, model_validator

from nestling.core.frozen import Frozen

__all__ = ["PrimeRlConfig"]


class PrimeRlConfig(Frozen):
    """prime-rl's `rl` program, once per job; see docs/prime-rl.md."""

    program: str = Field("rl", min_length=1)
    """A name on PATH or a path; the programs it starts are looked for beside it first."""
    unjailed: bool = False
    """Required off pods: prime-rl runs the job's own code outside the jail, with this user's rights."""
    veil: bool = True
    """Hide our secrets and all other processes from prime-rl with bubblewrap; false where it cannot be used."""
    train_gpus: int = Field(1, ge=1, le=8)
    """GPUs of the trainer; inference gets the first ones that the worker sees, the trainer the next."""
    infer_gpus: int = Field(1, ge=1, le=8)
    """GPUs of inference."""
    share_gpu: bool = False
    """Trainer and inference on one GPU, the first that the worker sees; lower `gpu_memory`."""
    gpu_memory: float = Field(0.85, gt=0, lt=1)
    """Share of its GPUs that inference takes."""
    step_s: float = Field(1200.0, gt=0)
    """A run without a finished step for so long hangs; the first one includes the start of inference."""
    poll_s: float = Field(1.0, gt=0, le=60)
    """Between two looks at a run."""
    passed_on: tuple[str, ...] = ()
    """Further environment variables that prime-rl may see; the job's code sees them too."""
    keep_runs: bool = False
    """Keep prime-rl's folders (logs, rollouts, checkpoints) beside the models."""

    @model_validator(mode="after")
    def _one_gpu(self) -> PrimeRlConfig:
        if self.share_gpu and (self.train_gpus, self.infer_gpus) != (1, 1):
            raise ValueError("share_gpu is for one GPU; set train_gpus and infer_gpus to 1")
        return self

    @property
    def num_gpus(self) -> int:
        """That a run is busy with."""
        return 1 if self.share_gpu else self.train_gpus + self.infer_gpus
