# mypy: disable-error-code="misc,untyped-decorator"
"""triage: services, incidents and deploys as a verifiers toolset.

As a script it serves the tools to one rollout.
"""

import random

import verifiers.v1 as vf
from pydantic import Field, StrictInt, StrictStr

from . import triage as rules
from .rollout import Data, RolloutState, RolloutTools

__all__ = ["Data", "State", "Tools", "sample"]


class State(RolloutState):
    """What was checked and who was paged in this rollout."""

    checked: list[str] = Field(default_factory=list)
    """Services whose incident was read, sorted."""
    pages: dict[str, str] = Field(default_factory=dict)
    """Alert, as text, to the person paged."""


class Tools(RolloutTools, vf.Toolset[vf.ToolsetConfig, State]):
    """service, incident, owner, deploy, author, page, close."""

    rules = rules

    @vf.tool
    def service(self, alert: StrictInt) -> str:
        """The service that an alert is about."""
        return self.use("service", alert=alert)

    @vf.tool
    def incident(self, service: StrictStr) -> str:
        """Open when the service has an open incident, else none."""
        return self.use("incident", service=service)

    @vf.tool
    def owner(self, service: StrictStr) -> str:
        """Who owns a service."""
        return self.use("owner", service=service)

    @vf.tool
    def deploy(self, service: StrictStr) -> str:
        """The number of the service's last deploy."""
        return self.use("deploy", service=service)

    @vf.tool
    def author(self, deploy: StrictInt) -> str:
        """Who made a deploy."""
        return self.use("author", deploy=deploy)

    @vf.tool
    def page(self, alert: StrictInt, person: StrictStr) -> str:
        """Page a person about an alert."""
        return self.use("page", alert=alert, person=person)

    @vf.tool
    def close(self) -> str:
        """Close the triage; gives the code that is the answer."""
        return self.use("close")


def sample(rng: random.Random, lo: int, hi: int) -> Data:
    """One training row with a difficulty between lo and hi."""
    return Data(**rules.sample(rng, lo, hi).to_dict())


if __name__ == "__main__":
    Tools.run()
