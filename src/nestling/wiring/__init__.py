"""Composition: the only place that names backends. Everything else takes what it needs as arguments."""
