"""Check a job before any money is spent on it; every failure says how to fix it."""

from __future__ import annotations

from nestling.jobs.probe_report import Predicted, ProbeReport, StageReport

__all__ = ["Predicted", "ProbeReport", "StageReport"]
