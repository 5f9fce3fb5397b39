"""The folder of committed results: its figures and tables, redrawn from the data in it."""

from nestling.report.published.redraw import redraw

__all__ = ["redraw"]
