import numpy as np
import pytest
import torch

from nestling.engine.cpu_cache import CpuCache
from nestling.engine.cpu_decoder import CpuDecoder
from nestling.engine.decoder import row_uniforms, sample_tokens
from nestling.engine.model import KVCache, decode, extend

from .conftest import make_config, make_model


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_draws_what_sample_tokens_draws(temperature: float) -> None:
    model = make_model()
    config, params, slots = model.config, model.params(), 5
    ours = CpuDecoder(params, config, num_slots=slots, max_len=40, temperature=temperature)
    theirs = KVCache(config, slots, 40)
    uniforms = np.stack([row_uniforms(slot, 41) for slot in range(slots)])
    ids = torch.arange(slots * 7).view(1, slots, 7) % 13 + 5
    start, rows = np.zeros((1, slots), np.int64), np.arange(slots)
    for slot in range(slots):
        ours.set_uniforms(slot, uniforms[slot])
    ours.extend(ids.numpy(), start, rows[None])
    extend(params, config, ids, torch.from_numpy(start), theirs, torch.from_numpy(rows))
    token, position = np.arange(slots) + 5, np.full(slots, 7)
    for _ in range(20):
        drawn, logp = ours.step(token, position, int(position.max()) + 1)
        fed, place = torch.from_numpy(token)[None], torch.from_numpy(position)[None]
        scores = decode(params, config, fed, place, theirs, int(position.max()) + 1)
        expected, expected_logp = sample_tokens(
            scores[0],
            torch.full((slots, 1), temperature),
            torch.from_numpy(uniforms[rows, position + 1]),
            any_greedy=temperature == 0,
        )
        assert drawn.tolist() == expected.tolist()
        assert np.abs(logp - expected_logp.numpy()).max() < 2e-5
        token, position = drawn, position + 1


def test_a_cache_keeps_what_it_holds_as_it_grows() -> None:
    cache = CpuCache(make_config(), 3, 4)
    for kind, buffers in enumerate((cache.keys, cache.values)):
        for layer, buffer in enumerate(buffers):
            buffer.fill_(1 + 10 * layer + kind)
    cache.grow(4)
    assert cache.max_len == 4
    cache.grow(9)
    assert cache.max_len == cache.keys[0].shape[2] == 9
    for kind, buffers in enumerate((cache.keys, cache.values)):
        for layer, buffer in enumerate(buffers):
            assert (buffer[:, :, :4] == 1 + 10 * layer + kind).all()
            assert (buffer[:, :, 4:] == 0).all()
            assert np.shares_memory(buffer.numpy(), cache.arrays)
