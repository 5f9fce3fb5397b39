"""triage, the trusted half: solution, plausible errors, vocabulary."""

from __future__ import annotations

import random
from typing import Any, Final

from nestling.families.family import Item, RuledFamily, Solution, Step, call_pieces
from nestling.families.public import triage as rules
from nestling.families.public.steps import LABELS, LAST_LABEL, NAMES

__all__ = ["TRIAGE", "Triage"]


class Triage(RuledFamily):
    """On-call incident triage across services, incidents and deploys."""

    name = "triage"
    rules = rules
    spec = (
        "Teach a small model to triage on-call alerts. For each alert it must find the service and "
        "check its incident. When the incident is open it pages the owner of the service; when there "
        "is none it finds the last deploy and pages its author. Then it closes and states the code, "
        "which depends on what was checked and who was paged."
    )
    eval_range = (1, 2)
    held_out = True
    vocabulary = (
        rules.SYSTEM_PROMPT,
        *rules.SERVICES,
        "open",
        "none",
        " alert ",
        " close.",
        *call_pieces(rules),
    )

    def solve(self, item: Item) -> Solution:
        """Four or five calls per alert, then close."""
        for label, text in zip(LABELS, item.world["alerts"], strict=False):
            alert = int(text)
            service = (yield label, "service", {"alert": alert}) or rules.SERVICES[0]
            incident = (yield label, "incident", {"service": service}) or "open"
            if incident == "open":
                person = yield label, "owner", {"service": service}
            else:
                deploy = (yield label, "deploy", {"service": service}) or "10"
                # a corrupted call may have answered with a name in place of a number
                deploy_id = int(deploy) if deploy.isdigit() else 10
                person = yield label, "author", {"deploy": deploy_id}
            page: Step = (
                label,
                "page",
                {"alert": alert, "person": person if person in NAMES else NAMES[0]},
            )
            yield page
        return (yield LAST_LABEL, "close", {}) or "10"

    def corrupt(
        self,
        item: Item,  # noqa: ARG002
        rng: random.Random,
        name: str,
        arguments: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """The other branch, another service or another person; numbers and close stay right."""
        if name in ("owner", "deploy"):
            return ("deploy" if name == "owner" else "owner"), arguments
        for key, choices in (("service", rules.SERVICES), ("person", NAMES)):
            if key in arguments:
                wrong = rng.choice([choice for choice in choices if choice != arguments[key]])
                return name, {**arguments, key: wrong}
        return name, arguments

    def guess(self, item: Item, rng: random.Random) -> str:  # noqa: ARG002
        """Any code."""
        return str(rng.randint(10, 99))


TRIAGE: Final = Triage()
