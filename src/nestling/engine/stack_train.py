"""Gradients and updates of several jobs in one batch, each with its own loss, rate and optimiser.

Axes: J job, B row, T token, K predicted token, P parameter. A job's rows are cut into tiles of a fixed number of
rows and a length in steps of 32, by that job's rows alone; tiles of one length are computed together. So every
shape a job's numbers come from is its own: computed one job at a time (`jobs_per_launch = 1`, the default on a CPU)
they are the same bits whoever is beside it. Together they agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.engine.batching import MicroBatch
from nestling.engine.learn import target_logprobs
from nestling.engine.leaves import Leaves, trained_tensor
from nestling.engine.lora import LoraConfig, LoraWeights
from nestling.engine.losses import Dppo, ImportanceSampling, Ipo, PpoClip, token_loss
from nestling.engine.model import Dropout, Model
from nestling.engine.optim import AdamW, Muon, Optimizer, Sgd, SignSgd, clip_norm
from nestling.engine.step_stats import LossStats, LossTotals, StepStats
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights

__all__ = [
    "JobSettings",
    "PlayedRows",
    "StackedJob",
    "TilePlan",
    "Update",
    "is_out_of_memory",
    "launch_gradients",
    "train_jobs",
]

_LENGTH_STEP = 32
_MOST_ROWS = 128
"""Of a tile when few jobs share a launch: launches cost more than padding then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """How one job learns."""

    loss: ImportanceSampling | PpoClip | Dppo | Ipo
    optim: AdamW | Sgd | Muon | SignSgd
    lora: LoraConfig | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRows:
    """What a job played: N rollouts of at most T tokens."""

    ids: npt.NDArray[np.int64]
    """[N, T], as are the next two."""
    sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    """[N], tokens that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One training step that a job asks for."""

    rows: PlayedRows
    advantages: npt.NDArray[np.float32]
    """[N]; a row with 0 and no cross-entropy weight is left out."""
    ce_weights: npt.NDArray[np.float32] | None
    """[N, T] or none."""
    temperature: float
    """Of sampling; above 0."""
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """How training is cut into launches."""

    rows: int = 8
    """B of a tile. Part of a job's arithmetic: another number rounds differently."""
    jobs_per_launch: int = 1
    tokens_per_launch: int = 8192
    """Launches of more tokens than this hold one job's tile alone."""

    def height(self, jobs: int, length: int) -> int:
        """Rows of a tile: `rows`, or twice that and so on while `jobs` tiles still fit into one launch.

        Only where jobs share launches; alone, a job's tiles do not depend on anything else.
        """
        found = self.rows
        while (
            self.jobs_per_launch > 1
            and 2 * found <= _MOST_ROWS
            and 2 * found * jobs * length <= self.tokens_per_launch
        ):
            found *= 2
        return found


class StackedJob:
    """Trained tensors and optimiser of one job, J = 1."""

    def __init__(
        self, base: Weights, tokenizer: Tokenizer, settings: JobSettings, device: torch.device
    ) -> None:
        self.settings = settings
        weights = base.clone() if settings.lora is None else base
        lora = None
        if settings.lora is not None:
            generator = torch.Generator().manual_seed(settings.seed)
            lora = LoraWeights.init(base.config, settings.lora, 1, generator, device)
        self.model = Model(config=base.config, weights=weights, tokenizer=tokenizer, lora=lora)
        self.flat, matrices = trained_tensor(self.model)
        self._optimizer = Optimizer(settings.optim, self.flat, matrices)
        share = 0.0 if settings.lora is None else settings.lora.dropout
        self.dropout: Dropout | None = None
        if share > 0:
            self.dropout = Dropout(share, torch.Generator(device).manual_seed(settings.seed))
        self._count = 0

    def merged(self) -> Weights:
        """Plain weights; those of a job without adapters share its memory."""
        lora = self.model.lora
        return self.model.weights if lora is None else lora.merged(self.model.weights)

    def apply(self, grad_1P: Tensor, lr: float, *, num_rows: int) -> StepStats:
        """Clip and update; no rows, or a gradient that is not finite, change nothing."""
        norm = clip_norm(grad_1P, self.settings.optim.max_norm)
        value = float(norm)
        updated = num_rows > 0 and bool(np.isfinite(value))
        if updated:
            rate = torch.tensor([lr], dtype=torch.float32, device=grad_1P.device)
            self._optimizer.step(grad_1P, rate)
        self._count += 1
        return StepStats(lr=lr, grad_norm=value, updated=updated, step=self._count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Rows of one job, not padded."""

    length: int
    """T, a multiple of 32."""
    rows: npt.NDArray[np.int64]
    """Indices into the job's played rows, at most B."""


def train_jobs(
    jobs: Sequence[StackedJob],
    updates: Sequence[Update],
    plan: TilePlan,
    dtype: torch.dtype | None = None,
) -> list[tuple[LossStats, StepStats] | None]:
    """One step of every job; all are of one base and on one device.

    `dtype` of the matrix products, float32 when None. When memory runs out the error is raised before any job was
    updated; None stands for a job whose own update found none, and which cannot go on.
    """
    found: dict[int, tuple[LossStats, Tensor]] = {}
    for group in _groups(jobs, plan):
        chosen = [jobs[i] for i in group]
        grad, totals, counts = launch_gradients(chosen, [updates[i] for i in group], plan, dtype)
        stats = totals.stats([rows for rows, _ in counts], [float(tokens) for _, tokens in counts])
        for k, i in enumerate(group):
            found[i] = (stats[k], grad[k : k + 1])
    return [
        _applied(job, *found[i], update.lr)
        for i, (job, update) in enumerate(zip(jobs, updates, strict=True))
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not get memory, on a GPU or a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _applied(
    job: StackedJob, stats: LossStats, grad_1P: Tensor, lr: float
) -> tuple[LossStats, StepStats] | None:
    try:
        return stats, job.apply(grad_1P, lr, num_rows=stats.num_rows)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _groups(jobs: Sequence[StackedJob], plan: TilePlan) -> list[list[int]]:
    """Jobs that share a launch: equal adapters, and no dropout, whose numbers belong to one job."""
    by_kind: dict[object, list[int]] = {}
    for i, job in enumerate(jobs):
        key: object = ("alone", i) if job.dropout is not None else job.settings.lora
        by_kind.setdefault(key, []).append(i)
    size = max(1, plan.jobs_per_launch)
    return [
        group[start : start + size]
        for group in by_kind.values()
        for start in range(0, len(group), size)
    ]


def launch_gradients(
    jobs: Sequence[StackedJob], updates: Sequence[Update], plan: TilePlan, dtype: torch.dtype | None
) -> tuple[Tensor, LossTotals, list[tuple[int, int]]]:
    """Gradient [J, P] of the mean loss per action token, its sums, and per job the rows and action tokens.

    Everything is enqueued on the jobs' device; nothing waits for it.
    """
    device = jobs[0].flat.device
    # A single job's tensors are used where they are: no copy, and the numbers of a lone trainer.
    flat = jobs[0].flat if len(jobs) == 1 else torch.cat([job.flat for job in jobs])
    model = jobs[0].model
    leaves = Leaves(model, flat)
    weights = [_ce_weights(update) for update in updates]
    kept = [_kept(update, ce) for update, ce in zip(updates, weights, strict=True)]
    action = [
        _spans(u.rows, rows) & u.rows.sampled[rows] for u, rows in zip(updates, kept, strict=True)
    ]
    counts = [(len(rows), int(one.sum())) for rows, one in zip(kept, action, strict=True)]
    tokens = torch.tensor([float(count) for _, count in counts], device=device)
    ce_tokens = torch.tensor(
        [float((ce[rows] > 0).sum()) for ce, rows in zip(weights, kept, strict=True)], device=device
    )
    longest = max((int(update.rows.lengths.max(initial=1)) for update in updates), default=1)
    height = plan.height(len(jobs), longest)
    tiles = [
        _tiles(update.rows, ce, rows, height)
        for update, ce, rows in zip(updates, weights, kept, strict=True)
    ]
    totals = LossTotals(len(jobs), device)
    for members, length in _launches(tiles, height, plan.tokens_per_launch):
        index = [j for j, _ in members]
        batch = _pack(
            [(updates[j], weights[j], tile) for j, tile in members], height, length, device
        )
        where = torch.tensor(index, device=device)
        temperature = torch.tensor([updates[j].temperature for j in index], device=device)
        logp = target_logprobs(
            leaves.params(dtype, index), model, batch, temperature, jobs[index[0]].dropout
        )
        loss, dropped = _losses([jobs[j].settings.loss for j in index], logp, batch)
        policy = torch.where(batch.action > 0, loss, 0.0).sum(1) / tokens[where].clamp(min=1)
        ce_loss = -(batch.ce * logp).sum(1) / ce_tokens[where].clamp(min=1)
        leaves.accumulate(policy.sum() + ce_loss.sum())
        totals.add(batch, logp.detach(), dropped, policy.detach(), ce_loss.detach(), None, where)
    return leaves.grad, totals, counts


def _losses(
    configs: Sequence[ImportanceSampling | PpoClip | Dppo | Ipo], logp_JK: Tensor, batch: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Loss and dropped tokens [J, K]; jobs with equal settings go together."""
    kinds = list(dict.fromkeys(configs))
    if len(kinds) == 1:
        return token_loss(kinds[0], logp_JK, batch.old_logp, batch.advantage)
    order = [[j for j, one in enumerate(configs) if one == kind] for kind in kinds]
    parts = [
        token_loss(kind, logp_JK[rows], batch.old_logp[rows], batch.advantage[rows])
        for kind, rows in zip(kinds, order, strict=True)
    ]
    flat = [j for rows in order for j in rows]
    back = torch.tensor(np.argsort(flat), device=logp_JK.device)
    return torch.cat([part[0] for part in parts])[back], torch.cat([part[1] for part in parts])[
        back
    ]


def _ce_weights(update: Update) -> npt.NDArray[np.float32]:
    if update.ce_weights is None:
        return np.zeros(update.rows.ids.shape, np.float32)
    return np.where(_spans(update.rows, np.arange(len(update.advantages))), update.ce_weights, 0.0)


def _spans(rows: PlayedRows, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[n, T]: which places are tokens of the row."""
    return np.arange(rows.ids.shape[1]) < rows.lengths[chosen, None]


def _kept(update: Update, ce: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.nonzero((update.advantages != 0) | (ce > 0).any(1))[0]


def _wanted(
    rows: PlayedRows, ce: npt.NDArray[np.float32], chosen: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """[n, T]: tokens to predict."""
    return _spans(rows, chosen) & (rows.sampled[chosen] | (ce[chosen] > 0))


def _tiles(
    rows: PlayedRows, ce: npt.NDArray[np.float32], kept: npt.NDArray[np.int64], size: int
) -> list[_Tile]:
    """Longest rows first; what is behind a row's last predicted token is left out."""
    wanted = _wanted(rows, ce, kept)
    T = wanted.shape[1]
    needed = np.where(wanted.any(1), T - 1 - wanted[:, ::-1].argmax(1), 0)  # inputs to the last one
    order = np.argsort(-needed, kind="stable")
    order = order[needed[order] > 0]
    found = []
    for start in range(0, len(order), size):
        chunk = order[start : start + size]
        length = -(-int(needed[chunk[0]]) // _LENGTH_STEP) * _LENGTH_STEP
        found.append(_Tile(length=length, rows=kept[chunk]))
    return found


def _launches(
    tiles_J: Sequence[Sequence[_Tile]], height: int, tokens_per_launch: int
) -> list[tuple[list[tuple[int, _Tile]], int]]:
    """Tiles of one length, at most one per job; longest first, and a job's own in its own order."""
    found = []
    for length in sorted({tile.length for tiles in tiles_J for tile in tiles}, reverse=True):
        queues = [
            [(j, tile) for tile in tiles if tile.length == length]
            for j, tiles in enumerate(tiles_J)
        ]
        share = max(1, tokens_per_launch // (height * length))
        for k in range(max(map(len, queues))):
            level = [queue[k] for queue in queues if k < len(queue)]
            found += [
                (level[start : start + share], length) for start in range(0, len(level), share)
            ]
    return found


def _pack(
    members: Sequence[tuple[Update, npt.NDArray[np.float32], _Tile]],
    size: int,
    length: int,
    device: torch.device,
) -> MicroBatch:
    """Padded tiles; K is the largest number of predicted tokens."""
    J = len(members)
    ids = np.zeros((J, size, length), np.int64)
    picks = []
    for j, (update, ce, tile) in enumerate(members):
        rows, chosen = update.rows, tile.rows
        width = min(length, rows.ids.shape[1])
        ids[j, : len(chosen), :width] = rows.ids[chosen, :width]
        b, t = np.nonzero(_wanted(rows, ce, chosen)[:, 1:])  # t predicts t + 1
        picks.append((b, t, chosen[b]))
    K = max(len(b) for b, _, _ in picks)
    index = np.zeros((2, J, K), np.int64)
    values = np.zeros((4, J, K), np.float32)
    for j, ((update, ce, _), (b, t, n)) in enumerate(zip(members, picks, strict=True)):
        rows, span = update.rows, slice(0, len(b))
        index[0, j, span], index[1, j, span] = b * length + t, rows.ids[n, t + 1]
        sampled = rows.sampled[n, t + 1]
        values[0, j, span] = sampled
        values[1, j, span] = np.where(sampled, rows.logprobs[n, t + 1], 0.0)
        values[2, j, span], values[3, j, span] = update.advantages[n], ce[n, t + 1]
    return MicroBatch.on(device, ids, index, values)
