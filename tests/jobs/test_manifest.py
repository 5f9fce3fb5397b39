import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.core.errors import JobRejectedError
from nestling.jobs.bounds import LARGE, SMALL
from nestling.jobs.manifest import JobManifest, parse_manifest, render_manifest

HEAD = 'base_model = "micro"\n[prime_rl]\n'


def problems_of(text, bounds=SMALL):
    with pytest.raises(JobRejectedError) as caught:
        parse_manifest(text, bounds)
    for problem in caught.value.problems:
        assert len(problem.line()) <= 160, problem.line()
    return caught.value.problems


MESSAGES = [
    ("lr = 1e-3\n", "schema.missing_base_model", "base_model is missing"),
    ('base_model = "mirco"\n', "schema.unknown_base_model", 'write base_model = "micro"'),
    ('base_model = "qwen3-0.6b"\n', "schema.unknown_base_model", "nano|micro"),
    ("base_model = 3\n", "schema.unknown_base_model", "base_model 3 is unknown"),
    ('base_model = "micro"\nlr = 1e-3\n', "schema.unknown_key", "write lr below a [prime_rl] line"),
    ('base_model = "micro"\nhooks = "x"\n', "schema.unknown_key", "remove it"),
    ('base_model = "micro"\nprime_rl = 3\n', "schema.wrong_type", "prime_rl is not a table"),
    ('base_model = "micro"\nenv = 3\n', "schema.wrong_type", "env is not a table"),
    (HEAD + "learning_rate = 1e-3\n", "schema.unknown_key", "write lr"),
    (HEAD + "steps = 4\n", "schema.unknown_key", "write max_steps"),
    (HEAD + "batch = 32\n", "schema.unknown_key", "write batch_size"),
    (HEAD + "group = 8\n", "schema.unknown_key", "write group_size"),
    (HEAD + "Max_Steps = 8\n", "schema.unknown_key", "write max_steps"),
    (HEAD + "temprature = 1\n", "schema.unknown_key", "write temperature"),
    (HEAD + 'model = "nano"\n', "schema.unknown_key", "write base_model on the first line"),
    (HEAD + 'output_dir = "/etc"\n', "schema.unknown_key", "remove it"),
    (HEAD + "lr = true\n", "schema.wrong_type", "lr = true has the wrong type"),
    (HEAD + 'lr = "1e-3"\n', "schema.wrong_type", "a number, 1e-5..3e-3"),
    (HEAD + "max_steps = 8.0\n", "schema.wrong_type", "an integer, 1..16"),
    (HEAD + "max_steps = [8]\n", "schema.wrong_type", "max_steps = list has the wrong type"),
    (HEAD + "optimizer = 1\n", "schema.wrong_type", 'optimizer = "adamw"'),
    (HEAD + "length_penalty = 1\n", "schema.wrong_type", "a truth value"),
    (HEAD + 'optimizer = "adam"\n', "schema.unknown_choice", 'write optimizer = "adamw"'),
    (HEAD + 'algo = "ppo"\n', "schema.unknown_choice", "grpo|max_rl|echo|rae"),
    (HEAD + "max_steps = 1000000000\n", "schema.out_of_bounds", "max_steps 1000000000 is out of"),
    (HEAD + "lr = nan\n", "schema.out_of_bounds", "lr nan is out of bounds"),
    (HEAD + "lr = inf\n", "schema.out_of_bounds", "1e-5..3e-3"),
    (HEAD + "lr = -1e-3\n", "schema.out_of_bounds", "lr = 1e-5"),
    (HEAD + "batch_size = 20\n", "schema.group_size", "group_size 8 does not divide batch_size 20"),
    (HEAD + "max_steps = 16\nbatch_size = 128\n", "budget.rollouts", "for example max_steps = 8"),
    (HEAD + "momentum = 0.5\n", "schema.no_effect", "momentum has no effect with optimizer adamw"),
    (HEAD + "lora_alpha = 16\n", "schema.no_effect", "remove lora_alpha or set lora_rank = 8"),
    (HEAD + "warmup_steps = 2\n", "schema.no_effect", "with scheduler constant"),
    (HEAD + 'loss = "ipo"\ndppo_mask_low = 0.1\n', "schema.no_effect", "with loss ipo"),
    (HEAD + 'algo = "max_rl"\nlength_penalty = true\n', "schema.no_effect", "with algo max_rl"),
    (HEAD + 'scheduler = "cosine"\nwarmup_steps = 8\n', "schema.warmup", "0..7"),
    (HEAD + 'scheduler = "linear"\ndecay_steps = 9\n', "schema.decay", "1..8 (max_steps)"),
    (HEAD + 'scheduler = "linear"\ndecay_steps = 0\n', "schema.decay", "decay_steps is 0"),
    (
        HEAD + 'scheduler = "cosine"\nmin_lr = 1e-3\n',
        "schema.min_lr",
        "min_lr 1e-3 is above lr 1e-5",
    ),
    (HEAD + "[env]\nid = 3\n", "schema.env_name", "id cannot be used"),
    (HEAD + '[env]\n"../x" = 3\n', "schema.env_name", "../x cannot be used"),
    (HEAD + "[env]\nseed = [1]\n", "schema.env_value", "seed = list cannot be used"),
    (HEAD + "[env]\nnoise = inf\n", "schema.env_value", "a finite number"),
    (
        HEAD + "[env]\n" + "".join(f"k{i} = 1\n" for i in range(17)),
        "schema.env_too_large",
        "17 keys",
    ),
    ("lr = \n", "schema.toml_syntax", "line 1"),
    (HEAD + "lr = 1e-3\nlr = 1e-4\n", "schema.toml_syntax", "overwrite"),
    ("x = " + "[" * 5000, "schema.toml_syntax", "not TOML"),
    (b"base_model = \xff", "schema.not_utf8", "byte 13"),
    ("base_model = \ud800", "schema.not_utf8", "UTF-8"),
    ("#" * 20_000, "schema.too_large", "20000 bytes"),
    ("", "schema.missing_base_model", "nano|micro"),
]


@pytest.mark.parametrize(("text", "code", "says"), MESSAGES)
def test_each_mistake_has_its_own_message(text, code, says):
    problems = problems_of(text)
    assert code in [problem.code for problem in problems]
    assert any(says in problem.line() for problem in problems if problem.code == code)


def test_all_problems_are_reported_at_once():
    text = 'base_model = "tiny"\n[prime_rl]\nlearning_rate = 1\nmax_steps = 99\nlr = true\n'
    codes = [problem.code for problem in problems_of(text)]
    assert codes == [
        "schema.unknown_base_model",
        "schema.unknown_key",
        "schema.out_of_bounds",
        "schema.wrong_type",
    ]


def test_an_integer_stands_for_a_float_and_defaults_fill_the_rest():
    manifest = parse_manifest(HEAD + "temperature = 1\nmax_steps = 4\n")
    assert manifest.explicit_keys == ("max_steps", "temperature")
    assert isinstance(manifest.prime_rl.temperature, float)
    assert manifest.prime_rl.batch_size == 64


def test_defaults_that_depend_on_other_keys():
    assert parse_manifest(HEAD + 'optimizer = "muon"\n').prime_rl.betas2 == 0.95
    linear = parse_manifest(HEAD + 'scheduler = "linear"\nwarmup_steps = 2\n').prime_rl
    assert (linear.warmup_steps, linear.decay_steps) == (2, 6)


def test_large_scale_has_its_own_numbers():
    text = 'base_model = "qwen3-0.6b"\n[prime_rl]\nlr = 1e-7\nmax_tokens = 2048\nalgo = "echo"\n'
    assert parse_manifest(text, LARGE).prime_rl.max_tokens == 2048
    assert problems_of('base_model = "nano"\n', LARGE)[0].code == "schema.unknown_base_model"


def test_build_checks_like_parsing():
    manifest = JobManifest.build("micro", lr=1e-3, max_steps=10)
    assert manifest == parse_manifest(HEAD + "lr = 1e-3\nmax_steps = 10\n")
    with pytest.raises(JobRejectedError):
        JobManifest.build("micro", lr=1.0)


def _setting(key):
    if key.kind == "choice":
        return st.sampled_from(key.choices)
    if key.kind == "bool":
        return st.booleans()
    if key.kind == "int":
        return st.integers(int(key.low), int(key.high))
    return st.floats(key.low, key.high)


ENV_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in ("id", "task", "env")
)
ENV_VALUES = (
    st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30).filter(str.isprintable)
)


@pytest.mark.long
@given(
    base=st.sampled_from(SMALL.base_models),
    table=st.fixed_dictionaries({}, optional={key.name: _setting(key) for key in SMALL.keys}),
    env=st.dictionaries(ENV_NAMES, ENV_VALUES, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_every_manifest_survives_a_round_trip(base, table, env):
    try:
        manifest = JobManifest.build(base, env=env, **table)
    except JobRejectedError as error:
        assert all(  # noqa: PT017
            problem.code.split(".")[1]
            in ("no_effect", "group_size", "rollouts", "warmup", "decay", "min_lr")
            for problem in error.problems
        )
        return
    assert parse_manifest(render_manifest(manifest)) == manifest
    assert set(manifest.explicit_keys) == set(table)
    assert JobManifest.model_validate_json(manifest.model_dump_json()) == manifest


@given(st.binary(max_size=200) | st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_input_is_parsed_or_rejected(text):
    try:
        parse_manifest(text)
    except JobRejectedError as error:
        assert error.problems  # noqa: PT017
