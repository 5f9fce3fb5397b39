import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.families.family import Family, Item, Solution, Step
from nestling.families.public import steps, string_pipeline
from nestling.families.public.answer import parse_answer
from nestling.families.registry import ALL, HELD_OUT, TRAINING, get

FAMILIES = [get(name) for name in ALL]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=ALL)
SEEDS = st.integers(0, 2**32)


def items(family: Family, n: int, seed: int = 0) -> list[Item]:
    rng = random.Random(seed)
    return [family.sample(rng, *family.eval_range) for _ in range(n)]


def next_step(solution: Solution, result: str | None) -> Step | None:
    try:
        return solution.send(result)
    except StopIteration:
        return None


def play(family: Family, item: Item) -> tuple[str, list[str]]:
    state, results = family.start(item), []
    solution = family.solve(item)
    try:
        _, name, arguments = next(solution)
        while True:
            results.append(family.call(item, state, name, arguments))
            _, name, arguments = solution.send(results[-1])
    except StopIteration as end:
        return end.value, results


@every_family
def test_the_solution_is_right_and_as_long_as_declared(family: Family) -> None:
    for item in items(family, 300):
        answer, results = play(family, item)
        assert answer == item.answer
        assert len(results) == item.num_calls >= 2
        assert family.grade(item, f"ANSWER: {answer}") == 1.0
        assert steps.BAD_CALL not in results


@every_family
def test_grading_takes_the_exact_form_and_nothing_else(family: Family) -> None:
    item = items(family, 1)[0]
    a = item.answer
    for text in (
        a, f"ANSWER:{a}", f"ANSWER: {a} ", f"ANSWER: {a}\n", f" ANSWER: {a}", f"answer: {a}",
        f"ANSWER: {a}.", f"ANSWER: {a}0", f"so ANSWER: {a}", f"ANSWER: {a}\nANSWER: {a}", "", "ANSWER: ",
        "ANSWER: wrong", f"the result is {a}", f"ANSWER:  {a}",
    ):  # fmt: skip
        assert family.grade(item, text) == 0.0, text


@every_family
@given(seed=SEEDS, lo=st.integers(-3, 12), width=st.integers(0, 5))
def test_an_item_survives_json_and_its_seed_gives_it_again(
    family: Family, seed: int, lo: int, width: int
) -> None:
    item = family.sample(random.Random(seed), lo, lo + width)
    assert Item(**json.loads(json.dumps(item.to_dict()))) == item
    again = family.sample(random.Random(seed), lo, lo + width)
    assert (again, again.identity) == (item, item.identity)
    assert play(family, item)[0] == item.answer
    assert parse_answer(f"ANSWER: {item.answer}") == item.answer


@every_family
def test_difficulty_is_the_number_of_steps_and_is_clamped(family: Family) -> None:
    rng = random.Random(0)
    calls = [
        [family.sample(rng, d, d).num_calls for _ in range(20)]
        for d in range(1, family.highest + 1)
    ]
    means = [sum(c) / len(c) for c in calls]
    assert means == sorted(means)
    assert max(family.sample(rng, 99, 99).num_calls for _ in range(20)) <= max(map(max, calls)) + 4
    with pytest.raises(ValueError, match="above"):
        family.sample(rng, 3, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
KNOWN = sorted({key for f in FAMILIES for args in f.rules.SIGNATURES.values() for key in args})
VALUES = st.one_of(
    JSON, st.sampled_from([*steps.NAMES, "api", "boss", "1+1", "17+", "abc", 10, 20, True, "5"])
)


@pytest.mark.long
@every_family
@given(data=st.data())
def test_no_call_raises_and_bad_calls_change_nothing(family: Family, data: st.DataObject) -> None:
    item = family.sample(random.Random(data.draw(st.integers(0, 20))), 1, 3)
    state = family.start(item)
    names = st.sampled_from([*family.rules.SIGNATURES, "nothing", ""])
    arguments = st.one_of(JSON, st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=3))
    for _ in range(3):
        before = json.dumps(state, sort_keys=True)
        result = family.call(item, state, data.draw(names), data.draw(arguments))
        assert isinstance(result, str)
        assert result
        if result.startswith("error:"):
            assert json.dumps(state, sort_keys=True) == before


@every_family
@given(seed=SEEDS)
def test_corrupted_calls_and_guesses_are_well_formed(family: Family, seed: int) -> None:
    rng = random.Random(seed)
    item = family.sample(rng, *family.eval_range)
    state, solution = family.start(item), family.solve(item)
    step: Step | None = next(solution)
    while step is not None:
        _, name, arguments = step
        wrong_name, wrong = family.corrupt(item, rng, name, dict(arguments))
        assert steps.read_call(family.rules.SIGNATURES, wrong_name, wrong) is not None
        result = family.call(item, state, wrong_name, wrong)
        step = next_step(solution, rng.choice([None, None if result == steps.BAD_CALL else result]))
    assert parse_answer(f"ANSWER: {family.guess(item, rng)}")


@every_family
def test_a_corrupted_call_usually_spoils_the_answer(family: Family) -> None:
    rng = random.Random(1)
    right = 0
    for item in items(family, 200, seed=2):
        at = rng.randrange(item.num_calls)
        state, solution = family.start(item), family.solve(item)
        step, index = next(solution), 0
        try:
            while True:
                name, arguments = step[1:]
                if index == at:
                    name, arguments = family.corrupt(item, rng, name, arguments)
                result = family.call(item, state, name, arguments)
                step, index = solution.send(None if result == steps.BAD_CALL else result), index + 1
        except StopIteration as end:
            right += end.value == item.answer
    assert right < 110


@pytest.mark.parametrize("name", ["ledger", "dispatch", "triage"])
def test_rollouts_of_one_item_do_not_share_state(name: str) -> None:
    family = get(name)
    item = items(family, 1)[0]
    before = json.dumps(item.to_dict())
    assert play(family, item) == play(family, item)
    assert json.dumps(item.to_dict()) == before


@pytest.mark.parametrize("name", ["dispatch", "triage"])
def test_the_closing_code_needs_every_action(name: str) -> None:
    family = get(name)
    close = ("close", {})
    for item in items(family, 20, seed=3):
        solution, calls = family.solve(item), []
        state = family.start(item)
        step = next(solution)
        while step[1] != "close":
            calls.append(step[1:])
            step = solution.send(family.call(item, state, *step[1:]))
        assert family.call(item, state, *close) == item.answer
        needed = [c for c in calls if c[0] in {"weigh", "route", "incident", "page"}]
        missed = 0
        for left_out in needed:
            state = family.start(item)
            for call in calls:
                if call != left_out:
                    family.call(item, state, *call)
            missed += family.call(item, state, *close) != item.answer
        assert missed >= len(needed) - 1


def test_five_families_train_and_triage_is_held_out() -> None:
    assert len(TRAINING) == 5
    assert HELD_OUT == ("triage",)
    assert set(ALL) == {*TRAINING, *HELD_OUT}
    with pytest.raises(Exception, match="unknown family"):
        get("nothing")


def test_string_operations_keep_two_letters() -> None:
    rng = random.Random(0)
    for name, operation in string_pipeline.OPERATIONS.items():
        text = "".join(rng.choice(string_pipeline.LETTERS) for _ in range(2))
        assert len(operation(text)) >= 2, name
