"""How short a schedule can be: a bound that no schedule beats, and longest-first for comparison."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["list_schedule_s", "lower_bound_s"]


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
