"""How short a schedule can be: a bound that no schedule beats, and schedules that come close.

The best possible schedule lies between the bound and the best one found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations

__all__ = ["best_found_s", "list_schedule_s", "lower_bound_s"]

_LEAST_GAIN = 1e-9


def lower_bound_s(lengths_s: Sequence[float], num_workers: int) -> float:
    """No schedule of these jobs on so many equal workers ends sooner, without preemption.

    The largest of: total work over workers; the longest job; and, for every k, the k + 1 shortest
    of the k * workers + 1 longest jobs, as two of those many share a worker with k - 1 others
    (Dell'Amico and Martello 1995, bound L3 without its refinements).
    """
    longest_first = sorted(lengths_s, reverse=True)
    bound_s = sum(longest_first) / num_workers
    for k in range((len(longest_first) - 1) // num_workers + 1):
        last = k * num_workers
        bound_s = max(bound_s, sum(longest_first[last - k : last + 1]))
    return bound_s


def list_schedule_s(lengths_s: Sequence[float], num_workers: int) -> float:
    """When all is done if a free worker takes the next job of this order."""
    free_at_s = [0.0] * num_workers
    for length_s in lengths_s:
        heapq.heappush(free_at_s, heapq.heappop(free_at_s) + length_s)
    return max(free_at_s)


def best_found_s(lengths_s: Sequence[float], num_workers: int) -> float:
    """Makespan of a good schedule for known lengths: longest first, then improved by exchanges.

    As long as it shortens the whole, up to two jobs of the worker that ends last change places with
    up to two of another. It may miss the best schedule, never beat it.
    """
    jobs: list[list[float]] = [[] for _ in range(num_workers)]
    for length_s in sorted(lengths_s, reverse=True):
        min(jobs, key=sum).append(length_s)
    while True:
        last = max(jobs, key=sum)
        found = min(
            (
                (max(sum(last) - moved, sum(other) + moved), number, given, taken)
                for number, other in enumerate(jobs)
                if other is not last
                for given, taken in _exchanges(last, other)
                if (moved := sum(given) - sum(taken)) > 0
            ),
            default=None,
        )
        if found is None or found[0] > sum(last) - _LEAST_GAIN:
            return sum(last)
        _, number, given, taken = found
        for length_s in given:
            last.remove(length_s)
        for length_s in taken:
            jobs[number].remove(length_s)
        last.extend(taken)
        jobs[number].extend(given)


def _exchanges(
    last: Sequence[float], other: Sequence[float]
) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
    """What one worker may give and take."""
    taken = [taken for size in range(3) for taken in combinations(other, size)]
    for size in (1, 2):
        for given in combinations(last, size):
            yield from ((given, one) for one in taken)
