"""The six tools of the agent as OpenAI function schemas, and the check of a call against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["TOOL_NAMES", "TOOL_SCHEMAS", "argument_problem", "tool_line"]

_TOOLS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "get_baseline_scores": (
        "The best untrained base model by its hidden-eval score, and the scores of all, two decimals.",
        {},
    ),
    "list_files": ("Paths of all files in the workspace.", {}),
    "read_file": (
        "Text of one file.",
        {"path": "Relative path, for example job.toml."},
    ),
    "write_file": (
        "Create or replace one file.",
        {"path": "Relative path, for example job.toml.", "content": "The whole new text."},
    ),
    "edit_file": (
        "Replace a text that occurs exactly once in a file.",
        {
            "path": "Relative path of an existing file.",
            "old": "Exact text to replace; must occur once.",
            "new": "The text to put in its place.",
        },
    ),
    "submit_job": (
        "Freeze the workspace and probe the job; a valid job is trained and the episode ends.",
        {},
    ),
}
"""Name to description and parameters; every parameter is a required string."""

TOOL_NAMES: Final = tuple(_TOOLS)


def _schema(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": text} for key, text in parameters.items()
                },
                "required": list(parameters),
                "additionalProperties": False,
            },
        },
    }


TOOL_SCHEMAS: Final = tuple(
    _schema(name, description, parameters) for name, (description, parameters) in _TOOLS.items()
)


def tool_line() -> str:
    """All tools with their parameters in one line."""
    return " ".join(f"{name}({', '.join(parameters)})" for name, (_, parameters) in _TOOLS.items())


def argument_problem(name: str, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call, and how it should look; None when it fits its schema."""
    if name not in _TOOLS:
        return f"there is no tool {name[:40]!r}; the tools are {tool_line()}"
    parameters = _TOOLS[name][1]
    missing = [key for key in parameters if key not in arguments]
    unknown = [str(key)[:40] for key in arguments if key not in parameters]
    wrong = [key for key in parameters if key in arguments and not isinstance(arguments[key], str)]
    signature = f"call {name}({', '.join(parameters)})"
    if missing:
        return f"{name} lacks {', '.join(missing)}; {signature}"
    if unknown:
        return f"{name} has no argument {', '.join(unknown[:3])}; {signature}"
    if wrong:
        return f"{name} needs text for {', '.join(wrong)}; {signature} with strings"
    return None
