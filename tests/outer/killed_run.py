"""A small nested run in a process of its own, to be killed: `python killed_run.py FOLDER`.

Prints a line per finished episode and, at the end, the hash of the trained weights.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path

from nestling.outer.config import EmbeddedConfig
from nestling.outer.learners.embedded import EmbeddedLearner
from nestling.store.run_store import RunStore


def load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"killed_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def main(folder):
    parts, nested = load("conftest"), load("test_nested")
    settings = nested.config(steps=4, groups_per_step=1, group_size=4, max_parallel_episodes=2)
    learner = EmbeddedLearner(
        parts.tiny_model(),
        folder / "states",
        max_total_tokens=96,
        config=EmbeddedConfig(lockstep=True),
    )
    player = nested.WordGame(learner, parts.TOKENIZER, parts.result_of)
    with RunStore(folder / "run.db") as store:
        await nested.run(
            settings,
            learner,
            player,
            store,
            on_episode=lambda one: print(one.plan.episode_id, flush=True),
        )
    print((await learner.publish()).model.weights.content_hash(), flush=True)
    learner.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
