"""Many demonstrations as flat arrays, the same whatever the number of processes.

Axes: E episode, N token of all episodes one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestling.core.seeds import derive_seed, stream
from nestling.families.demonstrations import ErrorRates, demonstrate, encode
from nestling.families.registry import get
from nestling.families.vocabulary import tokenizer

__all__ = ["Corpus", "generate"]

_CHUNK_EPISODES = 1000
Noise = Mapping[str, float]
"""Family name to noise knob z."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Encoded episodes."""

    ids: npt.NDArray[np.int16]
    """[N]."""
    sampled: npt.NDArray[np.bool_]
    """[N]."""
    starts: npt.NDArray[np.int64]
    """[E + 1]: where each episode starts, and one entry more: the end of the last."""

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.ids)

    def episode(self, index: int) -> tuple[list[int], list[bool]]:
        """Ids and sampled marks of one episode."""
        span = slice(self.starts[index], self.starts[index + 1])
        return self.ids[span].tolist(), self.sampled[span].tolist()

    def order(self, epoch: int, seed: int) -> list[int]:
        """All episode numbers in a shuffled order."""
        rng = np.random.default_rng(derive_seed(seed, "order", epoch))
        order: list[int] = rng.permutation(self.num_episodes).tolist()
        return order


def generate(
    noise: Noise,
    num_episodes: int,
    seed: int,
    executor: Executor | None = None,
    shares: Mapping[str, float] | None = None,
) -> Corpus:
    """`num_episodes` demonstrations of the families that are the keys of `noise`.

    `shares` says how often a family is drawn, 1 for those it does not name; without it all are drawn
    evenly. `executor` (of processes) shares the work out in fixed chunks, so it does not change the result.
    """
    sizes = [
        min(_CHUNK_EPISODES, num_episodes - start)
        for start in range(0, num_episodes, _CHUNK_EPISODES)
    ]
    weights = [(shares or {}).get(name, 1.0) for name in noise]
    jobs = [
        (dict(noise), weights, size, derive_seed(seed, "chunk", i)) for i, size in enumerate(sizes)
    ]
    chunks: Iterable[Corpus] = map(_chunk, jobs) if executor is None else executor.map(_chunk, jobs)
    return _join(list(chunks))


def _chunk(job: tuple[dict[str, float], list[float], int, int]) -> Corpus:
    noise, weights, num_episodes, seed = job
    is_even = len(set(weights)) == 1
    rng = stream(seed)
    families = [(get(name), ErrorRates.at(z)) for name, z in noise.items()]
    words = tokenizer()
    ids: list[int] = []
    sampled: list[bool] = []
    starts = [0]
    for _ in range(num_episodes):
        family, rates = (
            rng.choice(families) if is_even else rng.choices(families, weights=weights)[0]
        )
        item = family.sample(rng, *family.eval_range)
        episode = encode(words, item, demonstrate(family, item, rng, rates))
        ids += episode.ids
        sampled += episode.sampled
        starts.append(len(ids))
    return Corpus(
        ids=np.asarray(ids, np.int16),
        sampled=np.asarray(sampled, np.bool_),
        starts=np.asarray(starts, np.int64),
    )


def _join(chunks: Sequence[Corpus]) -> Corpus:
    offsets = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
    moved = [chunk.starts[:-1] + offset for chunk, offset in zip(chunks, offsets, strict=False)]
    return Corpus(
        ids=np.concatenate([np.zeros(0, np.int16), *(chunk.ids for chunk in chunks)]),
        sampled=np.concatenate([np.zeros(0, np.bool_), *(chunk.sampled for chunk in chunks)]),
        starts=np.concatenate([*moved, offsets[-1:]]),
    )
