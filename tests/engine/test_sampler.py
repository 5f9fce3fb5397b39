import numpy as np
import pytest
import torch

from nestling.core.errors import ConfigError
from nestling.engine.batching import TrainRow, micro_batches
from nestling.engine.decoder import row_uniforms, sample_tokens
from nestling.engine.learn import target_logprobs
from nestling.engine.model import Model, forward, logits
from nestling.engine.params import bind
from nestling.engine.sampler import (
    Rollout,
    SamplingParams,
    TurnEnd,
    TurnSampler,
    play,
    play_stacked,
)

from .conftest import make_model

PARAMS = SamplingParams(max_turn_tokens=9, max_total_tokens=70, max_turns=4)
PROMPTS = [[5 + i % 7, 6, 7, 8, 9, 10][: 1 + i % 6] for i in range(30)]


def answer(turns: list[TurnEnd]) -> list[list[int] | None]:
    """Depends on the turn alone; now and then the end of the row."""
    return [
        None if sum(turn.ids) % 5 == 0 else [3 + sum(turn.ids) % 50] * (1 + sum(turn.ids) % 11)
        for turn in turns
    ]


def naive(model: Model, prompt: list[int], seed: int, params: SamplingParams) -> Rollout:
    """One row, the whole sequence computed afresh for every token."""
    uniforms = row_uniforms(seed, params.max_total_tokens + 1)
    ids, sampled, logps, turns = list(prompt), [False] * len(prompt), [0.0] * len(prompt), 0
    weights = bind(model.config, model.weights.views())
    start, stop = len(ids), "max_tokens"
    while len(ids) < params.max_total_tokens:
        with torch.no_grad():
            hidden = forward(weights, model.config, torch.tensor([[ids]]))
            logp = (logits(weights, hidden[0])[0, -1] / params.temperature).log_softmax(-1)
        chance = logp.exp().cumsum(0)
        token = int((chance <= float(uniforms[len(ids)]) * chance[-1]).sum())
        ids.append(token)
        sampled.append(True)
        logps.append(float(logp[token]))
        ended = token == model.tokenizer.turn_end_id
        full = len(ids) >= params.max_total_tokens
        if not (ended or full or len(ids) - start >= params.max_turn_tokens):
            continue
        turns += 1
        text = model.tokenizer.decode(ids[start:-1] if ended else ids[start:])
        end = TurnEnd(row=0, ids=ids[start:], text=text, truncated=not ended)
        (forced,) = answer([end])
        if forced is None:
            stop = "max_tokens" if not ended else "done"
            break
        if full:
            break
        if turns >= params.max_turns:
            stop = "max_turns"
            break
        if len(ids) + len(forced) >= params.max_total_tokens:
            break
        ids += forced
        sampled += [False] * len(forced)
        logps += [0.0] * len(forced)
        start = len(ids)
    return Rollout(
        ids=ids,
        sampled=sampled,
        logprobs=logps,
        prompt_len=len(prompt),
        num_turns=turns,
        stop=stop,
    )


def ending_model(**changes: object) -> Model:
    """A model that ends turns often, depending on the state."""
    model = make_model(tie_embeddings=False, **changes)
    for job in range(model.num_jobs):
        head = model.weights.views()["lm_head"][job]
        generator = torch.Generator().manual_seed(job)
        head[model.tokenizer.turn_end_id] = torch.randn(32, generator=generator) * 0.4
    return model


def assert_same(ours: Rollout, theirs: Rollout) -> None:
    assert ours.ids == theirs.ids
    assert ours.sampled == theirs.sampled
    assert np.abs(np.array(ours.logprobs) - np.array(theirs.logprobs)).max() < 1e-4
    assert (ours.num_turns, ours.stop, ours.prompt_len) == (
        theirs.num_turns,
        theirs.stop,
        theirs.prompt_len,
    )


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "num_kv_heads": 1}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_batched_play_equals_the_naive_loop(temperature: float, changes: dict[str, object]) -> None:
    model = ending_model(**changes)
    params = SamplingParams(
        temperature=temperature, max_turn_tokens=9, max_total_tokens=70, max_turns=4
    )
    ours = play(model, PROMPTS, range(30), params, answer, max_rows=8)
    assert {rollout.stop for rollout in ours} == {"done", "max_turns", "max_tokens"}
    for i, rollout in enumerate(ours[:12]):
        assert_same(rollout, naive(model, PROMPTS[i], i, params))


@pytest.mark.long
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model = ending_model()
    together = play(model, PROMPTS, range(30), PARAMS, answer)
    reverse = play(model, PROMPTS[::-1], range(29, -1, -1), PARAMS, answer, max_rows=7)[::-1]
    for i in range(30):
        alone = play(model, [PROMPTS[i]], [i], PARAMS, answer)[0]
        for other in (together[i], reverse[i]):
            assert other.ids == alone.ids
            assert np.abs(np.array(other.logprobs) - np.array(alone.logprobs)).max() < 1e-5


def test_stacked_jobs_play_as_they_would_alone() -> None:
    model = ending_model(num_jobs=3)
    prompts = [PROMPTS[:5], PROMPTS[5:17], []]
    settings = [PARAMS, SamplingParams(temperature=0.8, max_total_tokens=40), PARAMS]
    seeds = [range(5), range(12), []]
    stacked = play_stacked(model, prompts, seeds, settings, answer, max_rows=6)
    for j in range(3):
        alone = Model(model.config, model.weights.job(j), model.tokenizer)
        expected = play(alone, prompts[j], seeds[j], settings[j], answer)
        assert len(stacked[j]) == len(prompts[j])
        for one, other in zip(stacked[j], expected, strict=True):
            assert_same(one, other)


def test_same_seeds_give_the_same_rollouts() -> None:
    model = ending_model()
    first = play(model, PROMPTS, range(30), PARAMS, answer)
    assert play(model, PROMPTS, range(30), PARAMS, answer) == first
    assert play(model, PROMPTS, range(1, 31), PARAMS, answer) != first


def test_greedy_takes_the_likeliest_token_and_its_plain_logprob() -> None:
    model = make_model()
    params = SamplingParams(temperature=0, max_turn_tokens=8, max_total_tokens=30, max_turns=1)
    (rollout,) = play(model, [[5, 6, 7]], [0], params, answer)
    ids = torch.tensor([[rollout.ids]])
    weights = model.params()
    with torch.no_grad():
        logp = logits(weights, forward(weights, model.config, ids)[0])[0].log_softmax(-1)
    for at in range(3, len(rollout.ids)):
        assert rollout.ids[at] == int(logp[at - 1].argmax())
        assert rollout.logprobs[at] == pytest.approx(float(logp[at - 1].max()), abs=1e-4)


def test_sampler_and_learner_agree_on_logprobs() -> None:
    model = ending_model()
    params = SamplingParams(temperature=0.7, max_turn_tokens=9, max_total_tokens=70)
    rollouts = play(model, PROMPTS, range(30), params, answer)
    rows = [TrainRow(ids=r.ids, sampled=r.sampled, logprobs=r.logprobs) for r in rollouts]
    for batch in micro_batches([rows], 400):
        with torch.no_grad():
            logp = target_logprobs(model.params(), model, batch, torch.tensor([0.7]))
        assert ((logp - batch.old_logp) * batch.action).abs().max() < 1e-4


def test_limits_hold() -> None:
    model = make_model()
    params = SamplingParams(max_turn_tokens=5, max_total_tokens=20, max_turns=3)
    long_prompt = [5] * 20
    seen: list[TurnEnd] = []

    def never(turns: list[TurnEnd]) -> list[list[int] | None]:
        seen.extend(turns)
        return [[7, 7] for _ in turns]

    rollouts = play(model, [[5], long_prompt, [5] * 19], [0, 1, 2], params, never)
    assert [len(rollout.ids) for rollout in rollouts] == [20, 20, 20]
    assert rollouts[1].num_turns == 0
    assert rollouts[1].stop == rollouts[2].stop == "max_tokens"
    assert {turn.row for turn in seen} == {0, 2}


def test_bad_arguments_are_explained() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="seeds"):
        play(model, [[5]], [], PARAMS, answer)
    with pytest.raises(ConfigError, match="empty"):
        play(model, [[]], [0], PARAMS, answer)
    with pytest.raises(ConfigError, match="answers"):
        play(model, [[5]], [0], PARAMS, lambda turns: [])
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=-1)


def test_nothing_to_play() -> None:
    assert play(make_model(), [], [], PARAMS, answer) == []


def test_sampled_frequencies_follow_the_distribution() -> None:
    scores = torch.tensor([[0.0, 1.0, -1.0, 2.0, -1e9]]).expand(20000, 5)
    uniforms = torch.from_numpy(row_uniforms(11, 20000))
    token, logp = sample_tokens(scores, torch.full((20000, 1), 0.8), uniforms, any_greedy=False)
    expected = (scores[0] / 0.8).softmax(0)
    share = torch.bincount(token, minlength=5) / 20000
    assert (share - expected).abs().max() < 0.015
    assert share[4] == 0
    assert torch.allclose(logp.exp(), expected[token], atol=1e-6)


def test_row_uniforms_are_a_function_of_seed_and_position() -> None:
    long, short = row_uniforms(4, 100), row_uniforms(4, 10)
    assert np.array_equal(long[:10], short)
    assert 0 <= long.min() < long.max() < 1


def test_turn_sampler_equals_play() -> None:
    model = ending_model()
    rollouts = play(model, PROMPTS[:12], range(12), PARAMS, answer)
    sampler = TurnSampler(model, slots=4, max_len=PARAMS.max_total_tokens)
    waiting = list(range(12))
    open_rows: dict[int, int] = {}
    turns: dict[int, int] = {}
    while waiting or open_rows:
        while waiting and len(open_rows) < 4:
            row = waiting.pop(0)
            open_rows[sampler.open(PROMPTS[row], row)] = row
            turns[row] = 0
        slots = sorted(open_rows)[: 1 + len(waiting) % 4]  # not all at once
        for slot, turn in zip(slots, sampler.sample(slots, PARAMS), strict=True):
            row = open_rows[slot]
            turns[row] += 1
            end = TurnEnd(row=row, ids=turn.ids, text=turn.text, truncated=turn.truncated)
            (forced,) = answer([end])
            over = forced is None or turns[row] >= PARAMS.max_turns
            if over or len(forced) >= sampler.remaining(slot):
                assert sampler.close(slot) == rollouts[row].ids
                del open_rows[slot]
            else:
                sampler.feed(slot, forced)


def test_turn_sampler_refuses_what_it_cannot_do() -> None:
    sampler = TurnSampler(make_model(), slots=1, max_len=10)
    with pytest.raises(ConfigError, match="fit"):
        sampler.open([5] * 11, 0)
    slot = sampler.open([5], 0)
    with pytest.raises(ConfigError, match="taken"):
        sampler.open([5], 0)
    with pytest.raises(ConfigError, match="fit"):
        sampler.feed(slot, [5] * 10)
    sampler.close(slot)
    with pytest.raises(ConfigError, match="not open"):
        sampler.sample([slot], PARAMS)
