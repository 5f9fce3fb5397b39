"""One fault at a time, with what it should do to a small fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    script: dict[str, Any]
    happens: str
    """For the table in docs/runpod.md."""
    event: tuple[str, str] | None = None
    """Kind of an event and a part of its `why` that must be there."""
    max_lost_usd: float
    """The most it may cost beyond the undisturbed fleet."""
    fleet: dict[str, Any] = field(default_factory=dict)
    linger_s: float = 0.0
    """The fleet stays so long after the last job."""


def request(route: str, do: str, **fields: Any) -> dict[str, Any]:
    return {"request": [{"route": route, "do": do, **fields}]}


def pod(do: str, number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"pod": [{"pods": [number], "do": do, **fields}]}


BOOT_USD = 120 / 3600 * 0.27
"""One boot of the cheapest pod."""

CASES = (
    Case(
        name="stock-out",
        script=request("create", "stock_out", nth=[1, 2]),
        happens="400; the rung cools down, the next one of the ladder is asked",
        max_lost_usd=0.06,
    ),
    Case(
        name="catalog says HIGH, there is none",
        script={
            "stock": [
                {"gpu": "NVIDIA RTX A5000", "count": 0, "shown": "HIGH", "usd_per_hour": 0.27},
                {"gpu": "NVIDIA A40", "count": 8, "usd_per_hour": 0.44},
            ]
        },
        happens="the same: stock is a hint",
        max_lost_usd=0.06,
    ),
    Case(
        name="create: reply lost, connection closed",
        script=request("create", "reply_lost", nth=[1], how="closed"),
        happens="the pod is found in the list by its name and used",
        max_lost_usd=0.005,
    ),
    Case(
        name="create: reply lost, 60 s timeout",
        script=request("create", "reply_lost", nth=[1], how="timeout", seconds=100),
        happens="the same, a minute later",
        max_lost_usd=0.01,
    ),
    Case(
        name="create: reply lost, 502",
        script=request("create", "reply_lost", nth=[1, 2], how="502"),
        happens="the same for both pods",
        max_lost_usd=0.005,
    ),
    Case(
        name="create: 500 and nothing made",
        script=request("create", "not_done", nth=[1], how="500"),
        happens="five looks at the list find nothing; asked again under another name",
        max_lost_usd=0.05,
    ),
    Case(
        name="reply lost, and the list is 45 s late",
        script=request("create", "reply_lost", nth=[1], how="closed") | {"list_lag_s": 45.0},
        happens="a second pod is asked for; the first is found later, used as a spare, ended when idle",
        max_lost_usd=0.05,
    ),
    Case(
        name="slow boot (7 min)",
        script=pod("slow", seconds=300),
        happens="waited for; the other pod works on",
        max_lost_usd=0.04,
    ),
    Case(
        name="RUNNING at once, worker later",
        script=pod("early_running"),
        happens="nothing: the worker's word counts, not the status",
        max_lost_usd=0.001,
    ),
    Case(
        name="never boots (no runtime)",
        script=pod("no_runtime"),
        happens="ended at the 10 min boot deadline with its system log; its rung cools down",
        event=("pod.ending", "no word of its worker"),
        max_lost_usd=0.07,
        linger_s=30.0,
    ),
    Case(
        name="boot ends in ERROR",
        script=pod("error"),
        happens="ended at the next look, replaced",
        event=("pod.ending", "status is ERROR"),
        max_lost_usd=0.04,
    ),
    Case(
        name="zombie: worker frozen, status RUNNING",
        script=pod("freeze", after_s=60),
        happens="silent for 60 s; ended; its job is done by another pod",
        event=("pod.ending", "silent"),
        max_lost_usd=0.04,
    ),
    Case(
        name="worker killed, container restarted",
        script=pod("kill", after_s=60),
        happens="the second life is refused, the pod is ended; its job is done by another pod",
        event=("pod.ending", "restarted"),
        max_lost_usd=0.04,
    ),
    Case(
        name="container in a crash loop",
        script=pod("crash_loop", after_s=60),
        happens="silent for 60 s; ended",
        event=("pod.ending", "silent"),
        max_lost_usd=0.04,
    ),
    Case(
        name="host dies: EXITED",
        script=pod("exit", after_s=60),
        happens="seen at the next look; ended; its job is done by another pod",
        event=("pod.ending", "status is EXITED"),
        max_lost_usd=0.04,
    ),
    Case(
        name="pod vanishes",
        script=pod("vanish", after_s=60),
        happens="missing twice: lost; its job is done by another pod",
        event=("pod.ending", "vanished"),
        max_lost_usd=0.04,
    ),
    Case(
        name="list 60 s late, own address 30 s late",
        script={
            "pod": [
                {"pods": [1, 2], "do": "list_lag", "seconds": 60},
                {"pods": [1, 2], "do": "get_lag", "seconds": 30},
            ]
        },
        happens="nothing: young pods get 90 s of grace",
        max_lost_usd=0.001,
    ),
    Case(
        name="deleted pods listed for 60 s more",
        script={"pod": [{"pods": [1, 2], "do": "delete_lag", "seconds": 60}]},
        happens="deleted again until list and address agree",
        max_lost_usd=0.001,
    ),
    Case(
        name="8 requests a minute",
        script={"per_minute": 8},
        happens="looks at the list are spread out; nothing is refused for long",
        max_lost_usd=0.02,
    ),
    Case(
        name="503 on every list for 3 min",
        script=request("list", "status", status=503, after_s=60, for_s=180),
        happens="nothing: workers are heard on another way",
        max_lost_usd=0.02,
    ),
    Case(
        name="zombie, and 503 on every delete for 3 min",
        script=pod("freeze", after_s=60)
        | request("delete", "status", status=503, after_s=200, for_s=180),
        happens="deleted again at every look until it works",
        event=("pod.ending", "silent"),
        max_lost_usd=0.06,
    ),
    Case(
        name="list stalls 30 s, three times",
        script=request("list", "stall", seconds=30, nth=[2, 3, 5]),
        happens="asked again",
        max_lost_usd=0.02,
    ),
    Case(
        name="HTML page of a proxy instead of an answer",
        script=request("list", "html", status=502, nth=[2, 3]),
        happens="read as text; asked again",
        max_lost_usd=0.02,
    ),
    Case(
        name="credit for one pod only",
        script={"credit_usd": 0.5},
        happens="402: no more pods are asked for, the one there does all the work",
        max_lost_usd=0.02,
    ),
)
