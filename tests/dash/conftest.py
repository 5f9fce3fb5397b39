"""Runs for the dashboard: those of the report's tests, made by the real outer loop."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


scripted = _load("dash_scripted_run", Path(__file__).parent.parent / "report" / "conftest.py")

make_run = scripted.make_run


@pytest.fixture(scope="session")
def runs(make_run, tmp_path_factory) -> Path:
    """A folder with two runs; never written to by tests."""
    folder = tmp_path_factory.mktemp("dash-runs")
    make_run(folder / "calm", steps=3)
    make_run(folder / "group" / "hostile", steps=1, text=scripted.HOSTILE, measured=False)
    return folder


@pytest.fixture(scope="session")
def hostile() -> str:
    return scripted.HOSTILE


@pytest.fixture(scope="session")
def evaluation(tmp_path_factory) -> Path:
    """A folder with what `nestling eval-agent` leaves: policies measured, none trained."""
    folder = tmp_path_factory.mktemp("evaluations")
    asyncio.run(scripted.measure_only(folder / "compared"))
    return folder
