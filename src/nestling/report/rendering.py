"""The template engine of all pages: reports and the dashboard. Imports no matplotlib."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from nestling.report import shown

__all__ = ["environment"]


def environment(package: str) -> Environment:
    """Templates of a package: escaped by default, a missing value is an error, filters of `shown`."""
    made = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update({name: getattr(shown, name) for name in shown.__all__})
    return made
