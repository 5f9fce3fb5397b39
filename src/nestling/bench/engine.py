"""Speed of the engine on one CPU thread, beside transformers and TRL in the same run.

CPU seconds of this process (seconds on the wall beside them), ours and theirs in turn, medians. Ratios are ours over
theirs: below 1 is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from statistics import median
from typing import Any, Final

import torch

from nestling.bench.engine_tools import ToolWorkload
from nestling.bench.engine_work import Work, Workload, decode_bound
from nestling.bench.peer_tools import trl_tool_grpo
from nestling.bench.peers import (
    Seconds,
    TransformersPeer,
    clock,
    has_transformers,
    has_trl,
    since,
    trl_grpo,
)
from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.core.errors import ConfigError
from nestling.families.bases import get

__all__ = ["SHAPES", "measure"]

SHAPES: Final = ("nano", "micro")
_FAMILY: Final = "ledger"
"""The task with tools: stateful, and the one with the most turns."""
_COLUMNS: Final = (
    "shape",
    "work",
    "CPU s",
    "wall s",
    "tokens/s",
    "peer",
    "peer CPU s",
    "peer wall s",
    "ours / peer",
)
_RATIOS: Final = {
    "decode": "cpu_decode_vs_hf",
    "multi_turn": "cpu_multi_turn_vs_hf",
    "train": "cpu_train_vs_hf",
    "grpo": "cpu_grpo_vs_trl",
    "tool_grpo": "cpu_tool_grpo_vs_trl",
}


def measure(
    *, shapes: Sequence[str] = SHAPES, runs: int = 5, work: Work | None = None, trl: bool = True
) -> Measured:
    """Decode, multi-turn rollout, training step and GRPO steps of shipped base models.

    Args:
        shapes: names of base models.
        runs: counted repetitions of each, at least one; a first one is not counted.
        work: sizes.
        trl: measure TRL too, when it is installed; its trainer takes seconds a step.

    Raises:
        ConfigError: fewer than one run.
        ModelError: an unknown base model.
    """
    if runs < 1:
        raise ConfigError(f"runs={runs}; expected at least 1, 5 for figures to be compared")
    used = work or Work()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = _machine_rates()
        found = [row for shape in shapes for row in _shape(shape, used, runs, trl, rates)]
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, Any] = {"machine": rates}
    ratios: dict[str, float] = {}
    for row in found:
        figures.setdefault(row["shape"], {})[row["work"]] = {
            name: value
            for name, value in row.items()
            if name not in ("ours_s", "peer_s", "ours_wall_s", "peer_wall_s")
        }
        if row["ratio"] is not None:
            ratios[f"{_RATIOS[row['work']]}[{row['shape']}]"] = row["ratio"]
    for name in _RATIOS.values():  # without a shape: the largest one measured
        last = [value for key, value in ratios.items() if key.startswith(name + "[")]
        if last:
            ratios[name] = last[-1]
    missing = [
        name
        for name, there in (("transformers", has_transformers()), ("trl", trl and has_trl()))
        if not there
    ]
    figures["peers_not_measured"] = missing
    figures["peer_versions"] = {
        name: metadata.version(name) for name in ("transformers", "trl") if find_spec(name)
    }
    if missing:
        tell(f"not measured: {', '.join(missing)}")
    return Measured(
        settings={
            "shapes": list(shapes),
            "runs": runs,
            "threads": 1,
            "unit": "CPU seconds of this process, medians; ours and the peer's in turn",
            **{name: getattr(used, name) for name in Work.__slots__},
        },
        runs=tuple(found),
        figures=figures,
        ratios=ratios,
        columns=_COLUMNS,
        rows=tuple(_cells(row) for row in found),
    )


def _shape(
    shape: str, work: Work, runs: int, trl: bool, rates: dict[str, float]
) -> list[dict[str, Any]]:
    workload = Workload(get(shape).folder, work)
    peer = TransformersPeer(workload) if has_transformers() else None
    sampled = work.rows * work.new_tokens
    trained = work.rows * (work.total_tokens - 1)
    jobs: list[tuple[str, Callable[[], object], Callable[[], object] | None, int]] = [
        ("decode", workload.decode, peer.decode if peer else None, sampled),
        ("multi_turn", workload.multi_turn, peer.multi_turn if peer else None, sampled),
        ("train", workload.train, peer.train if peer else None, trained),
    ]
    rows = []
    for name, ours, theirs, tokens in jobs:
        tell(f"{shape} {name}")
        ours_s, peer_s = _in_turn(ours, theirs, runs)
        rows.append(_row(shape, name, tokens, ours_s, peer_s, "transformers" if theirs else None))
    bound = decode_bound(workload, rates["flops_per_s"], rates["bytes_per_s"])
    rows[0] |= {**bound, "roofline_share": round(bound["bound_s"] / rows[0]["median_s"], 3)}
    tell(f"{shape} grpo")
    if trl and has_trl():
        peer_s, ours_s = trl_grpo(workload, runs, workload.grpo)
    else:
        ours_s, peer_s = _in_turn(workload.grpo, None, runs)
    rows.append(_row(shape, "grpo", sampled, ours_s, peer_s, "trl" if peer_s else None))
    tell(f"{shape} tool_grpo")
    rows.append(_tool_row(shape, work, runs, trl))
    return rows


def _tool_row(shape: str, work: Work, runs: int, trl: bool) -> dict[str, Any]:
    tools = ToolWorkload(
        get(shape).folder,
        _FAMILY,
        num_prompts=work.rows // work.group_size,
        group_size=work.group_size,
    )
    if trl and has_trl():
        peer_s, ours_s = trl_tool_grpo(tools, runs)
    else:
        ours_s, peer_s = _in_turn(tools.grpo, None, runs)
    counts = tools.counts()
    sampled = round(counts["rows"] * counts["sampled_tokens"])
    row = _row(shape, "tool_grpo", sampled, ours_s, peer_s, "trl" if peer_s else None)
    return row | {"last_step": counts}


def _in_turn(
    ours: Callable[[], object], theirs: Callable[[], object] | None, runs: int
) -> tuple[list[Seconds], list[Seconds]]:
    """Both, one after the other `runs` times after one run that is not counted."""
    ours_s, peer_s = [], []
    for _ in range(runs + 1):
        ours_s.append(_seconds(ours))
        if theirs is not None:
            peer_s.append(_seconds(theirs))
    return ours_s[1:], peer_s[1:]


def _seconds(work: Callable[[], object]) -> Seconds:
    before = clock()
    work()
    return since(before)


def _row(
    shape: str,
    work: str,
    tokens: int,
    ours: list[Seconds],
    theirs: list[Seconds],
    peer: str | None,
) -> dict[str, Any]:
    middle = median(one.cpu for one in ours)
    other = median(one.cpu for one in theirs) if theirs else None
    return {
        "shape": shape,
        "work": work,
        "median_s": middle,
        "median_wall_s": median(one.wall for one in ours),
        "tokens": tokens,
        "tokens_per_s": round(tokens / middle),
        "peer": peer,
        "peer_median_s": other,
        "peer_median_wall_s": median(one.wall for one in theirs) if theirs else None,
        "ratio": None if other is None else round(middle / other, 4),
        "ours_s": [one.cpu for one in ours],
        "ours_wall_s": [one.wall for one in ours],
        "peer_s": [one.cpu for one in theirs],
        "peer_wall_s": [one.wall for one in theirs],
    }


def _machine_rates() -> dict[str, float]:
    """Best rates of one thread: float32 products of 1024 x 1024, and reading 128 MiB."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    many = torch.ones(32 * 2**20)
    product = min(_seconds(lambda: torch.mm(a, b)).cpu for _ in range(8))
    reading = min(_seconds(lambda: many.sum()).cpu for _ in range(8))
    return {"flops_per_s": 2 * 1024**3 / product, "bytes_per_s": many.numel() * 4 / reading}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["shape"],
        row["work"],
        f"{row['median_s']:.3f}",
        f"{row['median_wall_s']:.3f}",
        str(row["tokens_per_s"]),
        row["peer"] or "-",
        "-" if row["peer_median_s"] is None else f"{row['peer_median_s']:.3f}",
        "-" if row["peer_median_wall_s"] is None else f"{row['peer_median_wall_s']:.3f}",
        "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
    )
