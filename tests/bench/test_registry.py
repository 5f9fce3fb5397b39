"""The table of benchmarks, the commands that follow from it and the functions that they call."""

from __future__ import annotations

import inspect

import pytest

from nestling.bench.registry import BENCHMARKS, measure_of
from nestling.cli.bench import command


@pytest.mark.parametrize("name", BENCHMARKS)
def test_command_offers_what_the_table_says_and_measure_takes_it(name: str) -> None:
    benchmark = BENCHMARKS[name]
    options = {option.name for option in command.commands[name].params}
    usual = {
        "families": bool(benchmark.families),
        "runs": benchmark.has_runs,
        "config": benchmark.has_room,
    }
    taken = inspect.signature(measure_of(name)).parameters
    assert {"out", "as_json"} <= options
    for argument, has in usual.items():
        assert (("settings" if argument == "config" else argument) in options) is has
        assert argument in taken or not has
    assert all(one.default is not one.empty for one in taken.values())
