import math

import pytest

from nestling.core.errors import JobRejectedError
from nestling.jobs.bounds import (
    LARGE,
    SMALL,
    Key,
    bounds_line,
    bounds_table_markdown,
    manifest_json_schema,
    number,
)
from nestling.jobs.manifest import PrimeRl, parse_manifest

BOTH = [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large")]


def test_settings_class_has_exactly_the_keys_of_the_table():
    assert set(PrimeRl.model_fields) == set(SMALL.names()) == set(LARGE.names())


@pytest.mark.parametrize("bounds", BOTH)
def test_every_default_is_within_its_bounds_and_valid_together(bounds):
    text = f'base_model = "{bounds.base_models[0]}"\n'
    manifest = parse_manifest(text, bounds)
    assert manifest.explicit_keys == ()
    assert manifest.prime_rl.model_dump() == bounds.defaults()
    for key in bounds.keys:
        if key.kind in ("int", "float"):
            assert key.low <= key.default <= key.high
        if key.kind == "choice":
            assert key.default in key.choices


@pytest.mark.parametrize("bounds", BOTH)
def test_rl_toml_paths_are_distinct_and_meanings_are_one_line(bounds):
    assert len({key.path for key in bounds.keys}) == len(bounds.keys)
    assert all(key.meaning.endswith(".") and "\n" not in key.meaning for key in bounds.keys)


def _companions(key: Key, end: str) -> str:
    """Other settings under which an extreme value of `key` is legal."""
    lines = {
        "max_steps": "batch_size = 16\n",
        "batch_size": "max_steps = 1\ngroup_size = 2\n",
        "group_size": "",
        "warmup_steps": "max_steps = 16\n",
        "decay_steps": "max_steps = 16\n",
        "min_lr": "lr = 3e-3\n",
    }
    text = lines.get(key.name, "")
    if key.only_with is not None:
        selector, values = key.only_with
        value = "8" if selector == "lora_rank" else f'"{values[0]}"'
        if key.name in ("warmup_steps", "min_lr"):
            value = '"cosine"'
        text += f"{selector} = {value}\n"
    if key.name == "decay_steps":
        text += "warmup_steps = 1\n" if end == "low" else ""
    return text


NUMERIC = [key for key in SMALL.keys if key.kind in ("int", "float")]


@pytest.mark.parametrize("key", NUMERIC, ids=lambda key: key.name)
@pytest.mark.parametrize("end", ["low", "high"])
def test_limits_are_inclusive(key, end):
    value = getattr(key, end)
    value = int(value) if key.kind == "int" else value
    text = f'base_model = "micro"\n[prime_rl]\n{_companions(key, end)}{key.name} = {value!r}\n'
    assert getattr(parse_manifest(text).prime_rl, key.name) == value


@pytest.mark.parametrize("key", NUMERIC, ids=lambda key: key.name)
@pytest.mark.parametrize("side", [-1, 1])
def test_beyond_a_limit_names_value_and_limits(key, side):
    limit = key.low if side < 0 else key.high
    value = int(limit) + side if key.kind == "int" else math.nextafter(limit, side * math.inf)
    text = f'base_model = "micro"\n[prime_rl]\n{key.name} = {value!r}\n'
    with pytest.raises(JobRejectedError) as caught:
        parse_manifest(text)
    problem = caught.value.problems[0]
    assert problem.code == "schema.out_of_bounds"
    assert problem.wrong.startswith(f"{key.name} ")
    assert problem.expected == key.limits()
    assert len(problem.line()) <= 160


def test_line_for_small_agents_holds_main_keys_and_rules_only():
    line = bounds_line()
    assert line == (
        "job.toml: base_model nano|micro; [prime_rl] lr 1e-5..3e-3, max_steps 1..16, "
        "batch_size 16..256, group_size 2..16, temperature 0.5..1.5, "
        "optimizer adamw|sgd|muon|sign_sgd; max_steps*batch_size <= 1024; "
        "group_size divides batch_size."
    )


@pytest.mark.parametrize("bounds", BOTH)
def test_table_and_schema_list_every_key(bounds):
    table = bounds_table_markdown(bounds)
    schema = manifest_json_schema(bounds)
    for key in bounds.keys:
        assert f"| `{key.name}` |" in table
        assert key.name in schema["properties"]["prime_rl"]["properties"]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e-3, "3e-3"),
        (1e-5, "1e-5"),
        (0.5, "0.5"),
        (16, "16"),
        (0.0, "0"),
        (0.9999, "0.9999"),
        (2.5e-4, "2.5e-4"),
    ],
)
def test_numbers_read_the_way_people_write_them(value, text):
    assert number(value) == text
    assert float(text) == value
