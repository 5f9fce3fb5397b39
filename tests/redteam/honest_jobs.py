"""Four honest jobs in a process of their own: `python honest_jobs.py STATE WORK`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nestling.config import InnerConfig, RunConfig
from nestling.redteam.hostile_job import FAMILY, hostile_job, manifest
from nestling.wiring.rooms import Room


def main(state: Path, work: Path) -> None:
    config = RunConfig(inner=InnerConfig(eval_items=24, leak_items=0, train_wall_s=600))
    room = Room(config, state, work)
    try:
        room.run(hostile_job(), FAMILY, lambda _: None)  # imports and baselines are paid here
        results = []
        for lr in (1e-4, 2e-4, 3e-4, 5e-4):
            job = hostile_job(toml=manifest(lr=lr, max_steps=4, batch_size=32, group_size=8))
            outcome = room.run(job, FAMILY, lambda _: None)
            assert outcome.status == "succeeded", outcome.detail
            results.append(
                {
                    "final_hash": outcome.final_hash,
                    "post": outcome.post,
                    "uplift": outcome.uplift,
                    "rewards": [step.reward_mean for step in outcome.steps],
                    "cpu_s": outcome.cpu_s,
                    "wall_s": outcome.wall_s,
                }
            )
    finally:
        room.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
