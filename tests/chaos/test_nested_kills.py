"""Real jobs while controller, workers, scorers and env workers are killed at random moments.

`NESTLING_CHAOS_KILLS` sets how many kills there are in all (default 200; `test_writer_kills` adds
100 of the store's writer), `NESTLING_CHAOS_SEED` which ones.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import killing
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]

NUM_EPISODES, NUM_WORKERS, KILLS_A_RUN = 8, 2, 25


def test_killed_runs_equal_the_undisturbed_one(tmp_path: Path, record_property) -> None:
    num_kills = int(os.environ.get("NESTLING_CHAOS_KILLS", "200"))
    rng = random.Random(int(os.environ.get("NESTLING_CHAOS_SEED", "0")))
    room = killing.make_room(tmp_path / "room")
    size = {"episodes": NUM_EPISODES, "workers": NUM_WORKERS}
    calm = killing.Run(tmp_path / "calm", room, **size)
    killing.kill_at_random(calm, rng, [], longest_pause_s=0.5, limit_s=900)
    expected = calm.rewards()
    assert calm.orphans() == []
    assert {summary["status"] for _, summary in expected.values()} == {"succeeded"}
    assert len({summary["weights"] for _, summary in expected.values()}) == NUM_EPISODES
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < num_kills:
        planned = min(KILLS_A_RUN, num_kills - kills.total())
        roles = [killing.ROLES[n % len(killing.ROLES)] for n in range(planned)]
        rng.shuffle(roles)
        run = killing.Run(tmp_path / f"run{number}", room, **size)
        try:
            killing.kill_at_random(run, rng, roles, longest_pause_s=1.0, limit_s=1800)
        finally:
            run.end()
        assert run.orphans() == []
        assert run.rewards() == expected
        kills += run.kills
        number += 1
        print({"runs": number, "kills": dict(kills)}, flush=True)
    for role in killing.ROLES:
        record_property(f"kills_of_{role}", kills[role])
    assert all(kills[role] > 0 for role in killing.ROLES)
