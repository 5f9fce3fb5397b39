import pytest
import torch

from nestling.bench.engine import measure
from nestling.bench.engine_tools import ToolWorkload
from nestling.bench.engine_work import Work, Workload, decode_bound
from nestling.bench.peers import has_transformers
from nestling.core.errors import ConfigError
from nestling.families.bases import get

SMALL = Work(rows=4, prompt_tokens=8, new_tokens=8, turns=2, tool_tokens=3, group_size=2)


@pytest.mark.long
def test_everything_is_measured_beside_the_peers_there_are() -> None:
    found = measure(shapes=["nano"], runs=1, work=SMALL, trl=False)
    assert [row["work"] for row in found.runs] == [
        "decode",
        "multi_turn",
        "train",
        "grpo",
        "tool_grpo",
    ]
    assert all(row["median_s"] > 0 for row in found.runs)
    assert 0 < found.runs[0]["roofline_share"] < 1.5
    assert ("cpu_decode_vs_hf" in found.ratios) == has_transformers()
    assert "cpu_grpo_vs_trl" not in found.ratios
    assert "trl" in found.figures["peers_not_measured"]


def test_work_has_the_tokens_it_says() -> None:
    workload = Workload(get("nano").folder, SMALL)
    assert all(sum(one.sampled) == 8 and len(one.ids) == 16 for one in workload.decode())
    assert all(sum(one.sampled) == 8 and len(one.ids) == 19 for one in workload.multi_turn())
    assert workload.grpo().num_tokens % 8 == 0
    tokenizer = workload.model.tokenizer
    assert all(tokenizer.encode(tokenizer.decode(ids)) == ids for ids in workload.prompts)


def test_tool_work_is_played_to_its_end_and_learned_from() -> None:
    workload = ToolWorkload(get("nano").folder, "ledger", num_prompts=2, group_size=4)
    before = workload.model.weights.clone()
    stats = workload.grpo()
    assert stats.num_rows == 8  # every row differs from its group's mean
    assert stats.max_abs_logp_diff < 1e-4
    assert stats.num_tokens == sum(sum(one.sampled) for one in workload.played)
    assert any(one.num_turns > 1 for one in workload.played)
    assert workload.counts()["rows"] == 8
    assert not torch.equal(before.flat, workload.model.weights.flat)


@pytest.mark.long
@pytest.mark.skipif(not has_transformers(), reason="transformers is not installed")
def test_training_is_the_same_as_the_peers() -> None:
    from nestling.bench.peers import TransformersPeer

    workload = Workload(get("nano").folder, SMALL)
    peer = TransformersPeer(workload)
    for _ in range(2):
        assert workload.train() == pytest.approx(peer.train(), rel=1e-4)


def test_bound_counts_by_hand() -> None:
    work = Work(rows=1, prompt_tokens=1, new_tokens=1, turns=1, group_size=1)
    workload = Workload(get("nano").folder, work)
    bound = decode_bound(workload, 1.0, 1e12)
    layer = 96 * 288 + 96 * 96 + 96 * 512 + 256 * 96
    norms = 7 * 96
    products = 2 * (3 * layer + 376 * 96 + norms)
    assert bound["flops"] == products + 4 * 96 * 3
    assert bound["bound_s"] == bound["flops"]


def test_no_runs() -> None:
    with pytest.raises(ConfigError, match="runs=0"):
        measure(runs=0)
