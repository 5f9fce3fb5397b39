"""How a job learns, as it travels to the stack process."""

from __future__ import annotations

from nestling.core.frozen import Frozen
from nestling.engine.learn import LoraConfig, LossConfig, OptimConfig
from nestling.engine.stack_train import JobSettings

__all__ = ["LearnSettings"]


class LearnSettings(Frozen):
    """JSON of an `engine.stack_train.JobSettings`."""

    loss: LossConfig
    optim: OptimConfig
    lora: LoraConfig | None = None
    seed: int = 0

    def for_engine(self) -> JobSettings:
        """The same in the engine's words."""
        return JobSettings(loss=self.loss, optim=self.optim, lora=self.lora, seed=self.seed)
