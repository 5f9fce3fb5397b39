from pathlib import Path

import pytest
import torch

from nestling.config import load_recipe
from nestling.core.errors import ConfigError
from nestling.engine.device import describe, expand, free_bytes
from nestling.engine.stack_plan import StackShape, shape_table
from nestling.families.bases import get
from nestling.wiring.checks import refuse_distant_stacks

GIB = 2**30


def shape(budget: int, **changes: object) -> StackShape:
    sizes = {"num_lanes": 40, "num_rows": 128, "max_len": 4096, "precision": "float32"}
    return StackShape.for_base(
        get("micro").folder, **(sizes | {"tile_tokens": 0, "budget": budget} | changes)
    )


def test_recipe_for_gpus_is_valid_and_stays_on_one_machine() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "gpu.toml"
    config = load_recipe(recipe)
    assert config.inner.trainer == "stacked"
    refuse_distant_stacks(config)
    with pytest.raises(ConfigError, match=r"fleet\.kind = 'ray'.*local"):
        refuse_distant_stacks(load_recipe(None, ["inner.trainer=stacked", "fleet.kind=ray"]))


def test_devices() -> None:
    assert expand(("cpu", "cpu")) == ("cpu",)
    assert "torch" in describe("cpu")
    assert free_bytes("cpu") > 0
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="0 usable GPUs"):
            expand(("cuda",))
    with pytest.raises(ConfigError, match="tpu"):
        load_recipe(None, ['inner.stack.devices=["tpu"]'])


def test_sizes_follow_from_the_memory() -> None:
    large, small = shape(120 * GIB), shape(4 * GIB)
    assert large.max_len == 1024  # the positions that the model knows
    assert (large.tile_tokens, small.tile_tokens) == (2**17, 8192)
    assert large.fitting(120 * GIB) == 40
    assert 1 <= small.fitting(4 * GIB) < 8
    for one, budget in ((large, 120 * GIB), (small, 4 * GIB)):
        assert one.tile_rows * one.max_len <= one.tile_tokens
        lanes = one.fitting(budget)
        assert one.total_bytes(lanes, budget) <= budget
    half = shape(120 * GIB, precision="bfloat16")
    assert half.lane_bytes() < 0.6 * large.lane_bytes()
    assert shape_table(large, 120 * GIB)["total"] == large.total_bytes(40, 120 * GIB)


def test_planned_bytes_of_a_lane_and_a_job_are_those_of_the_buffers() -> None:
    from nestling.engine.lane_decoder import LaneDecoder
    from nestling.engine.weights import num_parameters

    one = shape(4 * GIB, num_lanes=2, num_rows=3, max_len=64)
    decoder = LaneDecoder(one.config, 3, num_lanes=2, num_rows=3, max_len=64)
    tensors = [value for value in vars(decoder).values() if isinstance(value, torch.Tensor)]
    tensors += [*decoder._cache.keys, *decoder._cache.values]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert held == pytest.approx(2 * one.lane_bytes(), rel=0.05)  # and one spare row of cache
    assert one.job_bytes("adamw") == 3 * 4 * num_parameters(one.config)
    assert one.job_bytes("sign_sgd") == 4 * num_parameters(one.config)
