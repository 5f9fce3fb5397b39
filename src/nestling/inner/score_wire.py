"""The JSON lines between a worker and its scorer process; one object a line, strict both ways."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from nestling.core.frozen import Frozen
from nestling.families.splits import HiddenSplit
from nestling.inner.openai_config import OpenAiConfig

__all__ = [
    "MAX_LINE_BYTES",
    "REPLY",
    "REQUEST",
    "STACK_LOST",
    "Ready",
    "Refused",
    "ScoreReply",
    "ScoreRequest",
    "Start",
]

MAX_LINE_BYTES: Final = 1_000_000
"""Far above the longest reply (n = 10,000 items)."""
STACK_LOST: Final = "scorer.stack_lost"
"""Of a refusal that is no fault of the job: the stack that samples for the scorer is away."""


class Start(Frozen):
    """First line to the scorer; nothing of it is in its arguments or environment."""

    kind: Literal["start"] = "start"
    secret_path: str
    """File of the eval secret; read by the scorer alone."""
    bases: dict[str, str]
    """Name to folder of every pinned base model."""
    device: str = "cpu"
    """Where the scorer samples."""
    stacks: tuple[str, ...] = ()
    """Sockets of the stack processes that sample; none: the scorer samples itself."""
    openai: OpenAiConfig | None = None
    """A server that samples instead."""
    wall_s: float = Field(gt=0)
    """Until the process has to be ready."""


class ScoreRequest(Frozen):
    """Score one model."""

    kind: Literal["score"] = "score"
    model_folder: str
    base: str
    family: str
    split: HiddenSplit
    n: int = Field(ge=1, le=10_000)
    wall_s: float = Field(gt=0)
    """Until the reply has to be there."""


class Ready(Frozen):
    """The scorer has loaded everything it needs."""

    kind: Literal["ready"] = "ready"
    fingerprint: str
    commitments: dict[str, str]
    """Split to public commitment."""


class ScoreReply(Frozen):
    """A finished scoring."""

    kind: Literal["scored"] = "scored"
    correct: tuple[bool, ...]
    base_digest: str
    weights_hash: str
    delta_norm: float
    cpu_s: float


class Refused(Frozen):
    """The request cannot be served; the scorer goes on."""

    kind: Literal["refused"] = "refused"
    reason: str
    """Reason code, for example `scorer.refused`."""
    detail: str


REQUEST: Final = TypeAdapter[Start | ScoreRequest](
    Annotated[Start | ScoreRequest, Field(discriminator="kind")]
)
REPLY: Final = TypeAdapter[Ready | ScoreReply | Refused](
    Annotated[Ready | ScoreReply | Refused, Field(discriminator="kind")]
)
