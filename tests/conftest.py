"""What is costly to start is started once, and the longest test starts first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail

LONGEST = "test_one_step_of_the_nested_loop_without_network"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After the shuffle: begun last, the longest test would run alone while the other cores wait."""
    items.sort(key=lambda item: item.name != LONGEST)


@pytest.fixture(scope="session")
def jail() -> Jail:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed, so no job may run; apt install bubblewrap")
    return Jail()


@pytest.fixture(scope="session")
def zygote(jail: Jail) -> Iterator[Zygote]:
    """Imports once, so that every job's environment starts warm; shared by all folders of tests."""
    with Zygote(jail) as zygote:
        yield zygote
