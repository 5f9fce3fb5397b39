"""Experiment trackers: a run's metrics, under the names of `docs/metrics.md`, for other programs."""
