"""The scale of open models and its `[sft]` table."""

from dataclasses import replace

import pytest

from nestling.core.errors import ConfigError, JobRejectedError
from nestling.jobs.bounds import (
    OPEN,
    SMALL,
    bounds_line,
    bounds_table_markdown,
    manifest_json_schema,
)
from nestling.jobs.manifest import JobManifest, Sft, parse_manifest, render_manifest
from nestling.jobs.rl_toml import RlRun, render_rl_toml

HEAD = 'base_model = "smollm2-135m"\n'


def problems_of(text, bounds=OPEN):
    with pytest.raises(JobRejectedError) as caught:
        parse_manifest(text, bounds)
    return caught.value.problems


def test_every_default_is_within_its_bounds():
    assert set(Sft.model_fields) == {key.name for key in OPEN.sft}
    manifest = parse_manifest(HEAD, OPEN)
    assert manifest.prime_rl.model_dump() == OPEN.defaults()
    assert manifest.sft is None
    for key in (*OPEN.keys, *OPEN.sft):
        if key.kind in ("int", "float"):
            assert key.low <= key.default <= key.high
        assert key.meaning.endswith(".")


def test_an_empty_table_asks_for_the_default_warm_up():
    sft = parse_manifest(HEAD + "[sft]\n", OPEN).sft
    assert sft.model_dump() == {key.name: key.default for key in OPEN.sft}


def test_a_manifest_with_a_warm_up_survives_a_round_trip():
    manifest = JobManifest.build(
        "gemma3-270m", bounds=OPEN, sft={"steps": 3, "source": "rows"}, lr=1e-5
    )
    assert (manifest.sft.steps, manifest.sft.source) == (3, "rows")
    assert parse_manifest(render_manifest(manifest), OPEN) == manifest


WRONG = [
    ("steps", "0"),
    ("steps", "65"),
    ("rows", "0"),
    ("rows", "65"),
    ("lr", "9e-7"),
    ("lr", "1.1e-3"),
    ("source", '"hidden"'),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_beyond_a_limit_names_value_and_limits(name, value):
    (key,) = [key for key in OPEN.sft if key.name == name]
    problem = problems_of(HEAD + f"[sft]\n{name} = {value}\n")[0]
    assert problem.wrong.startswith(f"{name} ")
    assert problem.expected == key.limits()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sft]\nstep = 3\n", "write steps"),
        ("[sft]\nmax_steps = 3\n", "in [sft]"),
        ("sft = 3\n", "a [sft] line"),
        ("[sftt]\n", "write sft"),
    ],
)
def test_mistakes_in_the_table_come_with_their_fix(text, words):
    assert words in problems_of(HEAD + text)[0].line()


def test_small_models_have_no_such_table():
    problem = problems_of('base_model = "nano"\n[sft]\n', SMALL)[0]
    assert problem.code == "schema.unknown_key"
    assert "sft" not in bounds_line(SMALL) + bounds_table_markdown(SMALL)
    assert "sft" not in manifest_json_schema(SMALL)["properties"]


def test_prompt_table_and_schema_follow_the_bases_of_the_recipe():
    bounds = replace(OPEN, base_models=("mine",))
    assert bounds_line(bounds).startswith("job.toml: base_model mine; [prime_rl] lr 1e-6..1e-3")
    assert "[sft] steps 1..64, rows 1..64, lr 1e-6..1e-3, source dev|rows;" in bounds_line(bounds)
    table = bounds_table_markdown(bounds)
    assert "`base_model` is one of mine." in table
    assert all(f"| `{key.name}` |" in table for key in bounds.sft)
    schema = manifest_json_schema(bounds)["properties"]
    assert schema["base_model"] == {"enum": ["mine"]}
    assert set(schema["sft"]["properties"]) == {key.name for key in bounds.sft}
    assert problems_of(HEAD, bounds)[0].code == "schema.unknown_base_model"


def test_prime_rl_refuses_a_warm_up():
    manifest = JobManifest.build("smollm2-135m", bounds=OPEN, sft={})
    with pytest.raises(ConfigError, match="warm-up"):
        render_rl_toml(manifest, "smollm2-135m", RlRun(name="x"))
