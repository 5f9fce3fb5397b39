"""triage: find who to page for each alert across services, incidents and deploys, then close."""

from __future__ import annotations

import random
from typing import Any

from .item import Item
from .steps import (
    BAD_CALL,
    LABELS,
    LAST_LABEL,
    NAMES,
    Signatures,
    check_code,
    draw_difficulty,
    read_call,
)

__all__ = [
    "HIGHEST",
    "SERVICES",
    "SIGNATURES",
    "SYSTEM_PROMPT",
    "call",
    "sample",
    "start",
    "to_page",
]

SYSTEM_PROMPT = "tools: service incident owner deploy author page close"
HIGHEST = 4
"""Most alerts of an item."""
SIGNATURES: Signatures = {
    "service": {"alert": int},
    "incident": {"service": str},
    "owner": {"service": str},
    "deploy": {"service": str},
    "author": {"deploy": int},
    "page": {"alert": int, "person": str},
    "close": {},
}
SERVICES = ("api", "web", "auth", "mail", "pay", "cart", "news", "jobs")


def sample(rng: random.Random, lo: int, hi: int) -> Item:
    """An item of lo to hi alerts (within 1..4); the answer is the code that `close` gives.

    The code depends on which alerts had their service's incident checked and on who was paged.
    """
    num_alerts = draw_difficulty(rng, lo, hi, HIGHEST)
    alerts = rng.sample(range(10, 100), num_alerts)
    deploys = rng.sample(range(10, 100), len(SERVICES))
    world: dict[str, Any] = {
        "alerts": dict(zip(map(str, alerts), rng.sample(SERVICES, num_alerts), strict=True)),
        "services": {
            service: {
                "incident": rng.choice(("open", "none")),
                "owner": rng.choice(NAMES),
                "deploy": deploy,
                "author": rng.choice(NAMES),
            }
            for service, deploy in zip(SERVICES, deploys, strict=True)
        },
    }
    state = start(world)
    num_calls = 1
    for alert in alerts:
        service = world["alerts"][str(alert)]
        call(world, state, "incident", {"service": service})
        call(world, state, "page", {"alert": alert, "person": to_page(world, alert)})
        num_calls += 4 if world["services"][service]["incident"] == "open" else 5
    listed = " ".join(
        f"{label} alert {alert}." for label, alert in zip(LABELS, alerts, strict=False)
    )
    return Item(
        prompt=f"{listed} {LAST_LABEL} close.",
        system_prompt=SYSTEM_PROMPT,
        answer=call(world, state, "close", {}),
        num_calls=num_calls,
        world=world,
    )


def to_page(world: dict[str, Any], alert: int) -> str:
    """The owner of the alert's service when an incident is open, else its last deploy's author."""
    service = world["services"][world["alerts"][str(alert)]]
    return str(service["owner"] if service["incident"] == "open" else service["author"])


def start(world: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 (every family has the same form)
    """`checked`: services whose incident was read, sorted; `pages`: alert (as text) to person."""
    return {"checked": [], "pages": {}}


def call(world: dict[str, Any], state: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
    """What was found, `ok`, the closing code, or an error; changes `state`."""
    values = read_call(SIGNATURES, name, arguments)
    if values is None:
        return BAD_CALL
    if name == "close":
        checked = sorted(
            alert for alert, service in world["alerts"].items() if service in state["checked"]
        )
        return check_code(checked, sorted(state["pages"].items()))
    if name in ("incident", "owner", "deploy"):
        return _about_service(world, state, name, values[0])
    if name == "author":
        services = world["services"].values()
        return next((s["author"] for s in services if s["deploy"] == values[0]), BAD_CALL)
    alert = str(values[0])
    if alert not in world["alerts"]:
        return BAD_CALL
    if name == "service":
        return str(world["alerts"][alert])
    if values[1] not in NAMES:
        return BAD_CALL
    state["pages"][alert] = values[1]
    return "ok"


def _about_service(world: dict[str, Any], state: dict[str, Any], name: str, service: str) -> str:
    if service not in world["services"]:
        return BAD_CALL
    if name == "incident" and service not in state["checked"]:
        state["checked"].append(service)
        state["checked"].sort()
    return str(world["services"][service][name])
