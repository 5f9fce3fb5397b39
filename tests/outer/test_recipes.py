"""The shipped recipe for a hosted agent is what its page says."""

from pathlib import Path

import pytest

from nestling.config import load_recipe, recipe_toml
from nestling.core.errors import ConfigError
from nestling.outer.config import EmbeddedConfig, TinkerConfig
from nestling.outer.export import export_agent

RECIPE = Path(__file__).parents[2] / "recipes" / "tinker.toml"


def test_recipe_has_the_published_settings():
    config = load_recipe(RECIPE)
    assert isinstance(config.learner, TinkerConfig)
    assert config.learner.base_model == "Qwen/Qwen3.6-35B-A3B"
    assert config.learner.lora_rank == 8
    outer = config.outer
    assert (outer.learning_rate, outer.group_size, outer.temperature) == (4e-5, 8, 1.0)
    assert (outer.loss, outer.max_staleness) == ("importance_sampling", 1)


def test_learner_is_chosen_by_its_kind():
    assert isinstance(load_recipe(None).learner, EmbeddedConfig)
    assert isinstance(load_recipe(None, ["learner.lora_rank=4"]).learner, EmbeddedConfig)
    with pytest.raises(ConfigError, match=r"learner\.base_model is missing"):
        load_recipe(None, ["learner.kind=tinker"])
    with pytest.raises(ConfigError, match="should be embedded or tinker"):
        load_recipe(None, ["learner.kind=vllm"])
    with pytest.raises(ConfigError, match="did you mean base_url"):
        load_recipe(None, ["learner.kind=tinker", "learner.base_model=m", "learner.base_rul=x"])


def test_export_says_where_the_weights_of_a_hosted_agent_are(tmp_path):
    (tmp_path / "config.toml").write_text(recipe_toml(load_recipe(RECIPE)))
    with pytest.raises(ConfigError, match=r"weights\.download"):
        export_agent(tmp_path, tmp_path / "out", find_base=lambda name: tmp_path)


def test_the_open_agent_keeps_to_the_protocol_of_the_arc():
    arc, open_agent = (
        load_recipe(RECIPE.with_name(f"{name}.toml")) for name in ("arc", "arc-smollm2")
    )
    assert isinstance(open_agent.learner, EmbeddedConfig)
    assert open_agent.learner.lora_rank > 0
    outer = open_agent.outer
    assert (outer.steps, outer.groups_per_step * outer.group_size) == (12, 16)
    for key in (
        "loss",
        "epochs",
        "kl_coef",
        "std_normalise",
        "temperature",
        "clip",
        "max_staleness",
    ):
        assert getattr(outer, key) == getattr(arc.outer, key)
    assert open_agent.reward == arc.reward
    assert open_agent.families == arc.families
    assert open_agent.models == arc.models
    assert open_agent.inner.eval_items == arc.inner.eval_items
