"""The figures of a report, in the order they are read."""

from nestling.report.figures.draw_all import draw_all
from nestling.report.figures.drawing import Drawing

__all__ = ["Drawing", "draw_all"]
