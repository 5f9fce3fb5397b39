"""Calls of large models in both dialects; whatever a model says, something sensible comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.agent.call_dialects import parse_agent_turn
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall, render_call

WRITE = """<tool_call>
<function=write_file>
<parameter=path>
environment/taskset.py
</parameter>
<parameter=content>
def f():
    return "x"

</parameter>
</function>
</tool_call>"""

NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


def tagged(name, arguments):
    blocks = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


def test_tag_dialect_keeps_the_text_of_values():
    call = parse_agent_turn(f"I write it.\n{WRITE}\n")
    assert call == ToolCall(
        name="write_file",
        arguments={
            "path": "environment/taskset.py",
            "content": 'def f():\n    return "x"\n',
        },
        text_before="I write it.\n",
    )


def test_json_dialect_is_the_engines():
    text = render_call("read_file", {"path": "job.toml"})
    assert parse_agent_turn(text) == ToolCall(name="read_file", arguments={"path": "job.toml"})


def test_call_without_its_opening_tag_is_understood():
    assert parse_agent_turn(WRITE.removeprefix("<tool_call>\n")).name == "write_file"


def test_call_without_arguments():
    text = "<tool_call>\n<function=submit_job>\n</function>\n</tool_call>"
    assert parse_agent_turn(text) == ToolCall(name="submit_job", arguments={})


@pytest.mark.parametrize("opened", ["<think>\n", ""])
def test_thinking_is_left_out(opened):
    text = f"{opened}I could <tool_call> something.\n</think>\n\n{WRITE}"
    assert parse_agent_turn(text).name == "write_file"
    assert parse_agent_turn(f"{opened}hm</think>done") == FinalAnswer(text="done")


@pytest.mark.parametrize("make", [render_call, tagged])
def test_tags_inside_a_value_belong_to_the_value(make):
    content = "</think> </parameter> x </function> <tool_call> </tool_call>"
    call = parse_agent_turn(make("write_file", {"path": "a", "content": content}))
    assert isinstance(call, ToolCall)
    assert call.arguments["content"] == content


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WRITE + WRITE, "nothing more"),
        (WRITE.replace("</function>", ""), "no </parameter>"),
        (WRITE.replace("path>\n", "content>\n", 1), "given twice"),
        (WRITE.replace("<function=write_file>", "<function=>"), "NAME"),
        (WRITE.replace("</tool_call>", ""), "</tool_call>"),
        ("<tool_call>\n<function=f>\ntext\n</function>\n</tool_call>", "nothing more"),
        ("<tool_call>\n<function=f>" + "x" * 70_000, "longer"),
        ("<tool_call>{oops}</tool_call>", "JSON"),
    ],
)
def test_malformed_call_says_what_is_wrong(text, reason):
    parsed = parse_agent_turn(text)
    assert isinstance(parsed, MalformedCall)
    assert reason in parsed.reason


@given(NAMES, st.dictionaries(NAMES, TEXTS, max_size=4))
def test_tag_dialect_survives_the_round_trip(name, arguments):
    parsed = parse_agent_turn(tagged(name, arguments))
    hides_an_end = any("</parameter>" in value for value in arguments.values())
    if not hides_an_end:
        assert parsed == ToolCall(name=name, arguments=arguments)


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>",
     "</parameter>", "<think>", "</think>", "\n", '{"name": "f", "arguments": {}}', "x", "\ud800"]
)  # fmt: skip


@given(st.lists(FRAGMENTS | TEXTS, max_size=12))
def test_any_text_gives_one_of_three(parts):
    parsed = parse_agent_turn("".join(parts))
    assert isinstance(parsed, ToolCall | FinalAnswer | MalformedCall)
    if isinstance(parsed, ToolCall):
        assert all(isinstance(key, str) for key in parsed.arguments)
