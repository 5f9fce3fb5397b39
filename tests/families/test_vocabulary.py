import random
import re

import pytest

from nestling.engine.chat import render_call
from nestling.families.family import Family
from nestling.families.public import dispatch, multi_hop, string_pipeline, triage
from nestling.families.public.steps import LABELS, NAMES
from nestling.families.registry import ALL, get
from nestling.families.vocabulary import strings, tokenizer

ENTITIES = {
    *NAMES, *multi_hop.RELATIONS, *multi_hop.COLORS, *string_pipeline.OPERATIONS, *dispatch.VEHICLES,
    *triage.SERVICES, *LABELS,
}  # fmt: skip


def test_the_vocabulary_is_small_and_leaves_letter_strings_alone() -> None:
    assert tokenizer().vocab_size < 640
    assert not [s for s in strings() if set(s) <= set(string_pipeline.LETTERS)]
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice(string_pipeline.LETTERS) for _ in range(8))
        assert len(tokenizer().encode(text)) == 8


@pytest.mark.parametrize("family", [get(name) for name in ALL], ids=ALL)
def test_entities_are_one_token_everywhere_and_nothing_needs_long_byte_runs(family: Family) -> None:
    rng = random.Random(0)
    for _ in range(100):
        item = family.sample(rng, *family.eval_range)
        texts = [item.system_prompt, item.prompt, f"ANSWER: {item.answer}"]
        solution, state = family.solve(item), family.start(item)
        try:
            label, name, arguments = next(solution)
            while True:
                texts.append(label + render_call(name, arguments))
                texts.append(family.call(item, state, name, arguments))
                label, name, arguments = solution.send(texts[-1])
        except StopIteration:
            pass
        for text in texts:
            pieces = [tokenizer().decode([i]) for i in tokenizer().encode(text)]
            assert "".join(pieces) == text
            single = [p for p in pieces if len(p) == 1]
            assert set(single) <= set("0123456789abcdefgh+-*. ?/")
            for entity in ENTITIES:
                word = f"(?<![a-z]){re.escape(entity)}(?![a-z])"
                if re.search(word, text.replace(item.system_prompt, "")):
                    assert entity in pieces, (entity, text, pieces)
