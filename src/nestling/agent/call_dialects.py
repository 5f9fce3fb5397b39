"""Tool calls as large models write them: Hermes JSON, or the tags of Qwen's coder models.

Total: any text gives a call, a final answer, or a malformed call with a reason for the agent to read.
Thinking in front of the turn proper is left out. In the tag dialect every value is text, as all the
agent's tools take it:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re
from typing import Final

from nestling.engine.chat import (
    MAX_CALL_CHARS,
    MAX_NAME_CHARS,
    MalformedCall,
    ParsedTurn,
    ToolCall,
    parse_turn,
)

__all__ = ["parse_agent_turn"]

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_THOUGHT: Final = "</think>"
_FUNCTION: Final = re.compile(r"\s*<function=([^<>\s]{1,%d})>" % MAX_NAME_CHARS)  # noqa: UP031 (braces)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^<>\s]{1,%d})>" % MAX_NAME_CHARS)  # noqa: UP031
_VALUE_END: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
"""A value may itself hold the closing tag: only one that something follows ends it."""
_CALL_END: Final = re.compile(r"\s*</function>\s*</tool_call>\s*\Z")


def parse_agent_turn(text: str) -> ParsedTurn:
    """What a turn asks for, in whichever of the two dialects it is written."""
    thought, ended, said = text.partition(_THOUGHT)
    if not ended:
        return _parse(text)
    if _OPEN in thought and not thought.lstrip().startswith("<think>"):
        # A call whose arguments hold the tag, or a thought about calls: only one of them parses.
        whole = _parse(text)
        if isinstance(whole, ToolCall):
            return whole
    return _parse(said)


def _parse(said: str) -> ParsedTurn:
    before, marker, after = said.partition(_OPEN)
    if marker and after.lstrip().startswith("<function="):
        return _tagged(before, after)
    if not marker and "<function=" in said:
        # Coder models now and then leave out the opening tag, and only that.
        before, _, rest = said.partition("<function=")
        return _tagged(before, f"<function={rest}")
    return parse_turn(said)


def _tagged(before: str, body: str) -> ToolCall | MalformedCall:
    if len(body) > MAX_CALL_CHARS:
        return MalformedCall(reason=f"the call is longer than {MAX_CALL_CHARS} characters")
    head = _FUNCTION.match(body)
    if head is None:
        return MalformedCall(
            reason=f"expected <function=NAME> with a name of at most {MAX_NAME_CHARS} characters"
        )
    arguments: dict[str, str] = {}
    place = head.end()
    while (parameter := _PARAMETER.match(body, place)) is not None:
        key = parameter[1]
        end = _VALUE_END.search(body, parameter.end())
        if end is None:
            return MalformedCall(reason=f"the parameter {key} has no </parameter> after its value")
        if key in arguments:
            return MalformedCall(reason=f"the parameter {key} is given twice")
        arguments[key] = _value(body[parameter.end() : end.start()])
        place = end.end()
    if _CALL_END.match(body, place) is None:
        return MalformedCall(
            reason="expected one call: <parameter=NAME> blocks, then </function> and "
            f"{_CLOSE}, and nothing more"
        )
    return ToolCall(name=head[1], arguments=dict(arguments), text_before=before)


def _value(text: str) -> str:
    """The value without the line breaks that set it apart from its tags."""
    return text.removeprefix("\n").removesuffix("\n")
