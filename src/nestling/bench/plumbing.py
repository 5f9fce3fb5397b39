"""What a rollout costs beside the model: env worker and pipe, and verifiers' own lifecycle in the same run.

Six turns: five tool calls of the family's own solver and the answer, in batches of all rollouts, as a trainer
plays them. CPU milliseconds per rollout, of the worker (tools, state, trace, scoring) and of the trainer's end of
the pipe (frames and their checks). Ratios are ours over the lifecycle's time: below 1 is faster.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from nestling.bench.cpu_clock import CpuClock
from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.core.errors import ConfigError
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.public_package import public_files
from nestling.families.registry import ALL, get
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits, require_bubblewrap
from nestling.jobs.probe_policies import Lesson, lesson_of
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutEnv, Row
from nestling.jobs.spot_checks import SpotChecks
from nestling.jobs.template import template_job

__all__ = ["NUM_CALLS", "measure"]

NUM_CALLS: Final = 5
_NUM_ROWS: Final = 80
_FRAMES: Final = 4
"""A template job's batch of 64 crosses the pipe 17 to 24 times instead of 5."""
_COLUMNS: Final = (
    "family", "rollouts", "ms each", "worker", "pipe", "spot checks, ms a batch", "lifecycle, ms each",
    "ours / lifecycle",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """Five calls and an answer on one row."""

    row: int
    calls: Sequence[tuple[str, str, dict[str, Any]]]
    """Turn, tool, arguments."""
    final: str


def measure(
    *,
    families: Sequence[str] = ALL,
    sizes: Sequence[int] = (64, 128),
    runs: int = 5,
    lifecycle_rollouts: int = 32,
) -> Measured:
    """The template job's environment of each family, warm, tool schemas cached.

    Args:
        families: names.
        sizes: rollouts in a batch.
        runs: counted repetitions, at least one; a first one is not counted.
        lifecycle_rollouts: of verifiers' own lifecycle, in this process; 0 leaves it out.

    Raises:
        ConfigError: fewer than one run, or the jail is missing.
    """
    if runs < 1:
        raise ConfigError(f"runs={runs}; expected at least 1, 5 for figures to be compared")
    require_bubblewrap()
    jail = Jail()
    with Zygote(jail) as zygote:
        rows = []
        for family in families:
            tell(family)
            rows += _family(family, sizes, runs, lifecycle_rollouts, jail, zygote)
    # Ten batches, as the template job has.
    spot_s = max(row["spot_start_ms"] + 10 * row["spot_batch_ms"] for row in rows) / 1e3
    worst = {size: max(row["ms"] for row in rows if row["rollouts"] == size) for size in sizes}
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return Measured(
        settings={
            "families": list(families),
            "sizes": list(sizes),
            "runs": runs,
            "turns": NUM_CALLS + 1,
            "lifecycle_rollouts": lifecycle_rollouts,
            "unit": "CPU milliseconds per rollout, medians",
        },
        runs=tuple(rows),
        figures={"rollout_cpu_ms_max": worst, "spot_checks_cpu_s_max": round(spot_s, 3)},
        ratios={"rollout_vs_lifecycle_max": max(ratios)} if ratios else {},
        columns=_COLUMNS,
        rows=tuple(_cells(row) for row in rows),
    )


def _family(
    family: str, sizes: Sequence[int], runs: int, peers: int, jail: Jail, zygote: Zygote
) -> list[dict[str, Any]]:
    bundle = template_job(family)
    limits = JailLimits()

    def opened() -> RolloutEnv:
        return open_env(
            bundle.files, public_files(family), limits, jail=jail, starter=zygote, env_args={}
        )

    lifecycle_ms = _lifecycle_ms(family, peers, runs) if peers else []
    found = []
    with ExitStack() as stack:
        env = stack.enter_context(closing(opened()))
        scripts = _scripts(family, env.rows(_NUM_ROWS))
        clock = CpuClock()
        checked = SpotChecks(env, stack.enter_context(closing(opened())), get(family), seed=0)
        checked.rows(_NUM_ROWS)
        spot_start_s = clock.total_s()
        for size in sizes:
            batch = [scripts[k % len(scripts)] for k in range(size)]
            plain = [_batch(env, batch) for _ in range(runs + 1)][1:]
            ragged = [sum(_batch(env, batch, _FRAMES)) for _ in range(runs + 1)][1:]
            spotted = [sum(_batch(checked, batch, _FRAMES)) for _ in range(runs + 1)][1:]
            each_ms = [1e3 * sum(one) / size for one in plain]
            ms = median(each_ms)
            other = median(lifecycle_ms) if lifecycle_ms else None
            found.append(
                {
                    "family": family,
                    "rollouts": size,
                    "ms": round(ms, 4),
                    "worker_ms": round(median(1e3 * below / size for _, below in plain), 4),
                    "pipe_ms": round(median(1e3 * own / size for own, _ in plain), 4),
                    "ragged_ms": round(1e3 * median(ragged) / size, 4),
                    "spot_batch_ms": round(1e3 * (median(spotted) - median(ragged)), 2),
                    "spot_start_ms": round(1e3 * spot_start_s, 1),
                    "lifecycle_ms": None if other is None else round(other, 3),
                    "ratio": None if other is None else round(ms / other, 4),
                    "each_ms": each_ms,
                    "lifecycle_each_ms": lifecycle_ms,
                }
            )
    return found


def _batch(env: RolloutEnv, batch: Sequence[_Script], frames: int = 1) -> tuple[float, float]:
    """CPU seconds of this process and of the worker for one batch from start to scores.

    `frames` is how many times a turn's calls cross the pipe: a model's turns end at different steps.
    """
    clock = CpuClock()
    starts = env.reset([script.row for script in batch])
    pairs = list(zip(starts, batch, strict=True))
    for turn in range(NUM_CALLS):
        for frame in range(frames):
            env.step(
                [_call(start.rollout_id, script, turn) for start, script in pairs[frame::frames]]
            )
    records = env.score(
        [
            FinalRequest(rollout_id=start.rollout_id, text=script.final, stop="done")
            for start, script in pairs
        ]
    )
    spent = clock.own_s(), clock.below_s()
    assert all(record.error is None and record.reward == 1.0 for record in records)
    return spent


def _call(rollout_id: int, script: _Script, turn: int) -> CallRequest:
    text, name, arguments = script.calls[turn]
    return CallRequest(
        rollout_id=rollout_id,
        text=text,
        name=name,
        arguments=arguments,
        prompt_tokens=40 + 20 * turn,
        completion_tokens=12,
    )


def _scripts(family: str, rows: Sequence[Row]) -> list[_Script]:
    lessons = [lesson_of(row, get(family), (), "0", 0) for row in rows]
    return [_script(lesson) for lesson in lessons if 0 < len(lesson.solution) <= NUM_CALLS]


def _script(lesson: Lesson) -> _Script:
    """The solution, its last call repeated until there are five."""
    calls = [(f"{label}<tool_call>", name, arguments) for label, name, arguments in lesson.solution]
    # The last call of every family only reads, so saying it again leaves the world as it is.
    calls += [calls[-1]] * (NUM_CALLS - len(calls))
    return _Script(row=lesson.row.index, calls=calls, final=f"ANSWER: {lesson.answer}")


def _lifecycle_ms(family: str, rollouts: int, runs: int) -> list[float]:
    """The same through `Agent.run`; per rollout, in this process."""
    from nestling.bench.lifecycle import ScriptedTurns, play_lifecycle

    chosen, rng = get(family), random.Random(0)
    items = [chosen.sample(rng, *chosen.eval_range) for _ in range(4 * rollouts)]
    tasks: list[Any] = []
    scripts: list[ScriptedTurns] = []
    for task, item in zip(hidden_taskset(family, items), items, strict=True):
        row = Row(
            index=len(tasks),
            system_prompt=item.system_prompt,
            prompt=item.prompt,
            data_json=task.data.model_dump_json(),
        )
        for script in _scripts(family, [row]):
            calls = [(name, arguments) for _, name, arguments in script.calls]
            tasks.append(task)
            scripts.append(ScriptedTurns(calls=calls, final=script.final))
    tasks, scripts = tasks[:rollouts], scripts[:rollouts]
    each_ms = []
    for _ in range(runs + 1):
        started_s = time.process_time()
        traces = asyncio.run(play_lifecycle(tasks, scripts))
        each_ms.append(1e3 * (time.process_time() - started_s) / len(tasks))
        assert all(trace.ok and trace.reward == 1.0 for trace in traces)
    return each_ms[1:]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    lifecycle, ratio = row["lifecycle_ms"], row["ratio"]
    return (
        row["family"],
        str(row["rollouts"]),
        f"{row['ms']:.3f}",
        f"{row['worker_ms']:.3f}",
        f"{row['pipe_ms']:.3f}",
        f"{row['spot_batch_ms']:.1f}",
        "-" if lifecycle is None else f"{lifecycle:.2f}",
        "-" if ratio is None else f"{ratio:.3f}",
    )
