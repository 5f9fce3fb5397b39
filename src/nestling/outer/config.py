"""Everything the outer loop and its learner may be told; the defaults run on two CPU cores."""

from __future__ import annotations

from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from nestling.core.frozen import Frozen

__all__ = ["EmbeddedConfig", "HeldOutConfig", "LossKind", "OuterConfig", "TinkerConfig"]

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
LossKind = Literal["importance_sampling", "ppo_clip"]


class HeldOutConfig(Frozen):
    """When and how widely the agent is measured on families it is never trained on."""

    every_steps: int = Field(10, ge=0)
    """Outer steps between sweeps; 0 never sweeps while training."""
    episodes: int = Field(8, ge=1, le=10_000)
    """Episodes per family and arm."""
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """Of the intervals."""
    resamples: int = Field(2_000, ge=100, le=100_000)
    """Bootstrap and permutation draws."""


class OuterConfig(Frozen):
    """One outer run: how many steps, of what size, with which update."""

    seed: int = Field(0, ge=0)
    """Root of every random choice of the run."""
    steps: int = Field(5, ge=1, le=100_000)
    """Updates of the agent."""
    groups_per_step: int = Field(1, ge=1, le=1_024)
    """Groups in one update; each group is one task played `group_size` times."""
    group_size: int = Field(8, ge=2, le=256)
    """Episodes of the same task whose rewards are compared with each other."""
    max_staleness: int = Field(1, ge=0, le=16)
    """Training steps a group may lag behind by design; 0 is strictly on-policy."""
    over_stale: Literal["clip", "drop"] = "clip"
    """A group staler than that: train the step with `ppo_clip`, or leave the group out."""
    max_parallel_episodes: int = Field(16, ge=1, le=100_000)
    """Episodes played at the same time; the rest wait in the order they were admitted."""
    episode_timeout_s: float = Field(3_600.0, gt=0)
    """Wall-clock limit of one episode, its job included."""

    loss: LossKind = "importance_sampling"
    """Of the policy gradient; stale groups may need `ppo_clip`, see `over_stale`."""
    epochs: int = Field(1, ge=1, le=16)
    """Updates made from each batch, all on the whole of it; more than one needs `ppo_clip`."""
    clip: float = Field(0.2, gt=0, lt=1)
    """Half width of the ratio interval of `ppo_clip`."""
    kl_coef: float = Field(0.03, ge=0)
    """Weight of the divergence from the initial policy, both at `temperature`."""
    std_normalise: bool = False
    """Divide each group's centred rewards by their standard deviation."""
    learning_rate: float = Field(3e-4, gt=0, le=1)
    """AdamW; 1e-4 is slow and 1e-3 unstable for the embedded agent, LoRA wants about 10x more."""
    warmup_updates: int = Field(2, ge=0)
    """Updates of linear warm-up."""

    temperature: float = Field(0.7, gt=0, le=2)
    """Part of the agent's definition: the same in training and in evaluation."""
    max_turn_tokens: int = Field(512, ge=1)
    """Most tokens the agent may sample in one turn."""
    max_total_tokens: int = Field(2_048, ge=2)
    """Tokens of one whole episode, prompt and tool results included."""
    held_out: HeldOutConfig = HeldOutConfig()

    @model_validator(mode="after")
    def _turn_fits_episode(self) -> OuterConfig:
        if self.max_turn_tokens >= self.max_total_tokens:
            raise ValueError(
                f"max_turn_tokens={self.max_turn_tokens} must be below "
                f"max_total_tokens={self.max_total_tokens}; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _epochs_are_clipped(self) -> OuterConfig:
        if self.epochs > 1 and self.loss != "ppo_clip":
            raise ValueError(
                f"epochs={self.epochs} with loss={self.loss!r}; expected 'ppo_clip', because after its "
                "first update the policy is no longer the one that sampled; choose it as outer.loss"
            )
        return self

    def learning_rate_at(self, update: int) -> float:
        """Learning rate of the update with this index, counted from 0."""
        return self.learning_rate * min(1.0, (update + 1) / (self.warmup_updates + 1))


class EmbeddedConfig(Frozen):
    """The learner in this process: how it samples and what it trains."""

    kind: Literal["embedded"] = "embedded"
    num_sessions: int = Field(16, ge=1, le=4_096)
    """Sessions per published policy that are decoded together and keep their cache."""
    window_s: float = Field(0.02, ge=0, le=5)
    """How long the first request of a batch waits for others."""
    lockstep: bool = False
    """Decode every turn alone, so that results are equal bit for bit whatever else is going on."""
    lora_rank: int = Field(0, ge=0, le=256)
    """0 trains all weights."""
    lora_alpha_per_rank: float = Field(4.0, gt=0)
    """Scale of the adapter: alpha divided by the rank."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients longer than this are shortened to it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW; the values of hosted services, shorter-sighted than torch's."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW, decoupled."""
    token_budget: int | None = Field(None, ge=1)
    """Padded tokens of one micro-batch; None: what suits the device."""
    seed: int = Field(0, ge=0)
    """Of fresh adapters."""


class TinkerConfig(Frozen):
    """The learner behind a Tinker service; the key is read from the environment alone."""

    kind: Literal["tinker"] = "tinker"
    base_model: str = Field(min_length=1)
    """The service's name of the model that is trained; `agent.model` holds its tokenizer."""
    base_url: str = ""
    """A Tinker-compatible server, https unless it is on this machine; empty: the hosted service."""
    lora_rank: int = Field(8, ge=1, le=256)
    """Rank of the adapter that the service trains."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of the fresh adapter."""
    checkpoint_ttl_s: int = Field(604_800, ge=3_600)
    """Lifetime of every checkpoint; a run can be resumed for that long after its last step."""
    keep_states: int = Field(2, ge=1, le=1_000)
    """Saved states that keep their optimiser; older ones are deleted on the service."""
    sample_timeout_s: float = Field(300.0, gt=0)
    """One turn, waiting at the service included."""
    sample_attempts: int = Field(2, ge=1, le=10)
    """Tries of a turn that took too long; a turn may be asked for again."""
    train_timeout_s: float = Field(1_800.0, gt=0)
    """Every other call."""
    heartbeat_s: float = Field(30.0, gt=0)
    """A call that waits says so this often."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam; the service's defaults."""
    price_file: str = ""
    """A copy of the service's `models.json`; empty: the published one."""
    max_usd: float | None = Field(None, gt=0)
    """Estimated cost that no call may pass, each at the most it could cost; None: no cap."""

    @field_validator("base_url")
    @classmethod
    def _hides_the_key(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise ValueError(
                f"{url!r} would carry the key in the clear; expected https:// (plain http only to this "
                "machine); write the server's https address"
            )
        return url
