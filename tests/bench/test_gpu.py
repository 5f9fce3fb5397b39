from dataclasses import replace
from pathlib import Path

import pytest

from nestling.bench import gpu
from nestling.bench.gpu import PARTS, measure
from nestling.bench.gpu_jobs import jobs_of
from nestling.bench.gpu_shapes import LITTLE, Sizes
from nestling.bench.peers import has_transformers
from nestling.core.errors import ConfigError
from nestling.jobs.bounds import SMALL

TINY = Sizes(
    shapes=("toy",),
    rows=3,
    prompt_tokens=5,
    new_tokens=4,
    turns=2,
    tool_tokens=2,
    rollouts=4,
    group_size=2,
    stacked=(1, 2),
    steps=1,
    runs=1,
    peer_runs=1,
    precisions=("float32", "bfloat16"),
)
QUICK = ("decode", "lanes", "grpo", "stacked", "agreement", "memory")


@pytest.mark.long
def test_every_part_runs_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(parts=QUICK, device="cpu", sizes=TINY, kept=tmp_path)
    assert {row["part"] for row in found.runs} == set(QUICK)
    rows = {part: [row for row in found.runs if row["part"] == part] for part in QUICK}
    ours = [row for row in rows["decode"] if row["by"] != "transformers"]
    assert {(row["work"], row["tokens"]) for row in ours} == {("decode", 12), ("multi_turn", 12)}
    assert all(0 < row["roofline_share"] < 1.5 for row in ours if row["work"] == "decode")
    assert [row["jobs"] for row in rows["stacked"]] == [1, 2]
    exact = next(row for row in rows["agreement"] if row["precision"] == "float32")
    assert exact["tokens"] > 0
    assert exact["max_abs_logp_diff"] < 1e-4
    assert exact["mean_abs_ratio_minus_1"] < 1e-4
    assert all(row["total"] > row["lane"] > 0 for row in rows["memory"])
    named = any(name.startswith("gpu_decode_vs_hf_toy_decode") for name in found.ratios)
    assert named == has_transformers()

    monkeypatch.setattr(gpu, "_PER_SHAPE", dict.fromkeys(QUICK))  # measuring again would fail
    again = measure(parts=QUICK, device="cpu", sizes=replace(TINY, jobs=9), kept=tmp_path)
    assert again.runs == found.runs
    with pytest.raises(TypeError, match="not callable"):
        measure(parts=QUICK, device="cpu", sizes=replace(TINY, rows=4), kept=tmp_path)


def test_jobs_are_those_of_the_issue() -> None:
    bundles = jobs_of(6, Sizes())
    assert bundles[0].job_hash == bundles[5].job_hash
    for bundle in bundles:
        table = bundle.manifest(replace(SMALL, max_rollouts=2048)).prime_rl
        assert (table.max_steps, table.batch_size, table.group_size) == (10, 128, 8)


def test_unknown_part_and_shape() -> None:
    with pytest.raises(ConfigError, match="expected some of decode"):
        measure(parts=["speed"])
    with pytest.raises(ConfigError, match="smollm2-135m"):
        measure(parts=["lanes"], device="cpu", sizes=replace(TINY, shapes=("huge",)))


@pytest.mark.slow
def test_batch_of_whole_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path))
    found = measure(parts=["jobs"], device="cpu", sizes=LITTLE)
    assert [row["succeeded"] for row in found.runs] == [2, 2]
    assert "devices" in PARTS
