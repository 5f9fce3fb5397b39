"""Families of tasks: items, tools, grading, splits and base models."""

from nestling.families.public_package import public_files

__all__ = ["public_files"]
