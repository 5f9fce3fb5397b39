"""Nestling trains an AI agent that trains AI: reinforcement learning inside reinforcement learning."""

__all__ = ["__version__"]

__version__ = "0.1.0"
