import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.engine.chat import Message, prompt_ids
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.sampler import TurnEnd
from nestling.engine.weights import Weights
from nestling.families.corpus import generate
from nestling.families.demonstrations import (
    ErrorRates,
    demonstrate,
    encode,
    item_prompt_ids,
)
from nestling.families.family import Family
from nestling.families.item_play import _Game, play_items, scores
from nestling.families.registry import ALL, get
from nestling.families.vocabulary import tokenizer

FAMILIES = [get(name) for name in ALL]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=ALL)
SHAPE = ModelConfig(
    vocab_size=376, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8
)  # fmt: skip
MODEL = Model(config=SHAPE, weights=Weights.init(SHAPE, 2), tokenizer=tokenizer())


@every_family
@given(seed=st.integers(0, 2**32), z=st.sampled_from([0.0, 0.5, 2.0, 9.0]))
def test_ids_are_those_of_a_rollout(family: Family, seed: int, z: float) -> None:
    rng = random.Random(seed)
    item = family.sample(rng, *family.eval_range)
    exchanges = demonstrate(family, item, rng, ErrorRates.at(z))
    episode = encode(tokenizer(), item, exchanges)

    game = _Game(MODEL, [(family, item)])
    ids, sampled = item_prompt_ids(tokenizer(), item), []
    sampled += [False] * len(ids)
    for exchange in exchanges:
        turn = [*tokenizer().encode(exchange.turn), tokenizer().turn_end_id]
        text = tokenizer().decode(turn[:-1])
        [answer] = game.respond([TurnEnd(row=0, ids=turn, text=text, truncated=False)])
        ids += [*turn, *(answer or [])]
        sampled += [True] * len(turn) + [False] * len(answer or [])
        assert (answer is None) == (exchange.result is None)
    assert (episode.ids, episode.sampled) == (ids, sampled)
    assert game.correct_J[0][0] == (family.grade(item, exchanges[-1].turn) == 1.0)

    history = [
        Message(role="system", content=item.system_prompt),
        Message(role="user", content=item.prompt),
    ]
    for exchange in exchanges:
        history.append(Message(role="assistant", content=exchange.turn))
        if exchange.result is not None:
            history.append(Message(role="tool", content=exchange.result))
    assert prompt_ids(tokenizer(), history)[: len(ids)] == ids


@every_family
def test_clean_episodes_are_right_and_noise_costs_score(family: Family) -> None:
    rng, shares = random.Random(0), []
    for z in (0.0, 1.0, 4.0):
        right = 0
        for _ in range(200):
            item = family.sample(rng, *family.eval_range)
            turn = demonstrate(family, item, rng, ErrorRates.at(z))[-1].turn
            right += family.grade(item, turn) == 1.0
        shares.append(right / 200)
    assert shares[0] == 1.0
    assert 0.3 < shares[1] < 0.8
    assert shares[2] < shares[1] - 0.15


@every_family
def test_an_episode_is_short(family: Family) -> None:
    rng = random.Random(0)
    lengths = []
    for _ in range(200):
        item = family.sample(rng, *family.eval_range)
        lengths.append(len(encode(tokenizer(), item, demonstrate(family, item, rng)).ids))
    assert sum(lengths) / len(lengths) < 95
    assert max(lengths) < 140


def test_rates_scale_and_are_capped() -> None:
    assert ErrorRates.at(1.0) == ErrorRates()
    assert ErrorRates.at(2.0).wrong_argument == 0.09
    assert max(getattr(ErrorRates.at(1000), name) for name in ErrorRates.__slots__) == 0.9


@pytest.mark.long
def test_a_corpus_does_not_depend_on_who_made_it() -> None:
    noise = {"ledger": 0.0, "triage": 1.0}
    alone = generate(noise, 2100, seed=3)
    with ThreadPoolExecutor(2) as pool:
        shared = generate(noise, 2100, seed=3, executor=pool)
    assert alone.num_episodes == 2100
    assert np.array_equal(alone.ids, shared.ids)
    assert np.array_equal(alone.starts, shared.starts)
    assert not np.array_equal(alone.ids[:500], generate(noise, 5, seed=4).ids[:500])
    ids, sampled = alone.episode(2099)
    text = tokenizer().decode([i for i, own in zip(ids, sampled, strict=True) if own])
    assert text.endswith("<|im_end|>")
    assert sorted(alone.order(0, 1)) == list(range(2100))
    assert alone.order(0, 1) != alone.order(1, 1)


def test_playing_scores_every_job_on_the_same_items() -> None:
    rng = random.Random(0)
    items = [(family, family.sample(rng, 1, 1)) for family in FAMILIES]
    first, second = play_items(MODEL, items, seed=1)
    assert len(first) == len(second) == len(FAMILIES)
    found = scores(MODEL, ["ledger", "triage"], 3, seed=0)
    assert found == [{"ledger": 0.0, "triage": 0.0}] * 2
