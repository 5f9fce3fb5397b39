import base64
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.families.registry import ALL, get
from nestling.families.splits import EvalSecret, hidden_items
from nestling.jobs.leaks import LeakIndex, _words, leak_problems
from nestling.jobs.rollout_env import Row

LEAKED = 40


def items_of(family, seed, count):
    rng = random.Random(seed)
    lo, hi = family.eval_range
    return [family.sample(rng, lo, hi) for _ in range(count)]


def row_of(index, prompt, **data):
    return Row(
        index=index,
        system_prompt="",
        prompt=prompt,
        data_json=json.dumps({"prompt": prompt} | data),
    )


def rows_of(items):
    return [
        row_of(i, item.prompt, answer=item.answer, num_calls=item.num_calls, world=item.world)
        for i, item in enumerate(items)
    ]


@pytest.fixture(scope="module")
def indexed():
    """Family name to its hidden items and their index."""
    made = {}
    for name in ALL:
        family = get(name)
        hidden = items_of(family, 1, 200)
        index = LeakIndex.build(
            family,
            {"b": hidden, "dev": items_of(family, 2, 16)},
            honest_rows=800,
            key=b"0123456789abcdef",
        )
        made[name] = (hidden, index)
    return made


@pytest.mark.parametrize("name", ALL)
def test_honest_rows_pass(indexed, name):
    _, index = indexed[name]
    for seed in (11, 12, 13):
        rows = rows_of(items_of(get(name), seed, 256))
        assert leak_problems(index, rows, {}) == []


@pytest.mark.parametrize("name", ALL)
def test_whole_items_are_found_in_every_family(indexed, name):
    hidden, index = indexed[name]
    honest = rows_of(items_of(get(name), 11, 200))
    problems = leak_problems(index, [*honest, *rows_of(hidden[:LEAKED])], {})
    assert len(problems) == 1
    assert problems[0].code.startswith("rows.leak_")
    assert f"{LEAKED} in all" in problems[0].wrong or "in all" in problems[0].wrong
    assert len(problems[0].line()) <= 160


def _custom(text):
    return text.replace("balance", "balance_custom")


def _rename(text):
    for old, new in {"ann": "zoe", "bob": "yan", "cat": "xia", "dan": "wim", "eve": "val"}.items():
        text = text.replace(old, new)
    return text


def _as_python(texts):
    return "ROWS = [\n" + ",\n".join(map(repr, texts)) + "\n]\n"


DISGUISES = [
    pytest.param(lambda p: p, "exact", id="verbatim"),
    pytest.param(str.upper, "normalised", id="case"),
    pytest.param(lambda p: p.replace(".", " ;").replace("?", "!"), "normalised", id="punctuation"),
    pytest.param(lambda p: " ".join(reversed(p.split())), "reordered", id="word order"),
    pytest.param(_custom, "renamed", id="suffix"),
    pytest.param(_rename, "renamed", id="names"),
    pytest.param(lambda p: f"please {p} now and then think it over", "phrases", id="wrapped"),
    pytest.param(lambda p: base64.b64encode(p.encode()).decode(), "encoded_exact", id="base64"),
    pytest.param(
        lambda p: base64.urlsafe_b64encode(json.dumps({"q": p}).encode()).decode(),
        "encoded_exact",
        id="base64 json",
    ),
    pytest.param(lambda p: p.encode().hex(), "encoded_exact", id="hex"),
    pytest.param(lambda p: p[::-1], "encoded_exact", id="backwards"),
]


@pytest.mark.parametrize(("disguise", "kind"), DISGUISES)
def test_disguised_questions_are_found_in_rows(indexed, disguise, kind):
    hidden, index = indexed["ledger"]
    rows = [row_of(i, "say 1", extra=disguise(item.prompt)) for i, item in enumerate(hidden)]
    matches = index.search(rows, {})
    assert len(matches) >= 0.9 * len(hidden)
    assert kind.replace("_", " ", 1) in {match.kind for match in matches}
    assert leak_problems(index, rows, {})


@pytest.mark.parametrize(("disguise", "kind"), DISGUISES)
@pytest.mark.parametrize(
    ("path", "dump"),
    [
        ("data/rows.txt", "\n".join),
        ("data/rows.json", json.dumps),
        ("data/rows.jsonl", lambda texts: "\n".join(json.dumps({"q": text}) for text in texts)),
        ("environment/rows.py", _as_python),
    ],
    ids=["txt", "json", "jsonl", "py"],
)
def test_disguised_questions_are_found_in_files(indexed, disguise, kind, path, dump):
    hidden, index = indexed["ledger"]
    content = dump([disguise(item.prompt) for item in hidden[:LEAKED]])
    problems = leak_problems(
        index, rows_of(items_of(get("ledger"), 11, 64)), {path: content.encode()}
    )
    assert problems
    assert path in problems[0].wrong
    assert len(problems[0].line()) <= 160


def test_dev_items_have_their_own_message(indexed):
    index = indexed["ledger"][1]
    rows = rows_of(items_of(get("ledger"), 2, 16))
    assert "example items of TASK.md" in leak_problems(index, rows, {})[0].expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["multi_hop", "dispatch"])
def test_index_of_a_family_holds_dev_and_all_hidden_sets(name):
    secret = EvalSecret(bytes(32))
    index = LeakIndex.for_family(name, secret, hidden=50, dev=20, key=b"key")
    assert index.sizes == {"dev": 20, "a": 50, "b": 50, "c": 50}
    rows = rows_of(hidden_items(name, "c", 50, secret))
    assert {match.split for match in index.search(rows, {})} == {"c"}
    assert leak_problems(index, rows, {})


def test_index_survives_bytes_and_holds_no_text(indexed):
    hidden, index = indexed["ledger"]
    data = index.dumps()
    assert LeakIndex.loads(data) == index
    assert all(item.prompt.encode() not in data for item in hidden)
    assert b"deposit" not in data


def test_another_key_gives_other_hashes():
    family = get("ledger")
    hidden = {"b": items_of(family, 1, 8)}
    one, two = (LeakIndex.build(family, hidden, honest_rows=50, key=key) for key in (b"a", b"b"))
    assert not set(one.fingerprints) & set(two.fingerprints)


@given(st.text(max_size=300), st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_text_can_be_scanned(indexed, text, content):
    index = indexed["ledger"][1]
    row = Row(index=0, system_prompt="", prompt=text, data_json=text)
    files = {"data/a.txt": content, "data/b.json": text.encode("utf-8", "replace")}
    assert index.search([row], files) == []


@pytest.mark.long
def test_lines_made_of_escaped_quotes_are_read_in_linear_time(indexed):
    files = {"data/x.txt": b'"' + b'\\"' * 100_000, "data/y.txt": b"\\'\"" * 60_000}
    began = time.process_time()
    _, index = indexed["ledger"]
    index.search([], files)
    assert time.process_time() - began < 10


def test_characters_that_swell_when_normalised_stay_small():
    assert len(_words("\ufdfa\u3316" * 1000 + " x")) < 10


@pytest.mark.long
@pytest.mark.parametrize("name", ["calc_chain", "ledger", "dispatch"])
def test_items_inside_longer_texts_are_found_among_many_hidden_items(name):
    family = get(name)
    hidden = items_of(family, 1, 1200)
    index = LeakIndex.build(family, {"b": hidden}, key=b"0123456789abcdef")
    leaked = [
        row_of(i, f"Please help me. {item.prompt} Thank you, and be exact.")
        for i, item in enumerate(hidden[:256])
    ]
    assert leak_problems(index, leaked, {})
    for seed in (21, 22, 23, 24):
        assert leak_problems(index, rows_of(items_of(family, seed, 512)), {}) == []
