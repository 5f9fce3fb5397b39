import json
from pathlib import Path

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.engine.chat import (
    FinalAnswer,
    MalformedCall,
    Message,
    ToolCall,
    parse_turn,
    prompt_ids,
    render_call,
    tool_result_ids,
)
from nestling.engine.tokenizer import CHAT_TEMPLATE, GLUE, PAD, TURN_END, TURN_START, Tokenizer

TOKENIZER = Tokenizer.closed(["ann", "ANSWER: ", "(a)"])
SYSTEM = Message(role="system", content="tools: x")
USER = Message(role="user", content="ask ann")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, max_size=3)


def test_a_turn_costs_few_tokens() -> None:
    assert len(prompt_ids(TOKENIZER, [SYSTEM, USER])) == len("tools: x") + len("ask ") + 1 + 3
    assert len(tool_result_ids(TOKENIZER, "ann")) == 3


def test_a_prompt_reads_as_the_dialect() -> None:
    assert TOKENIZER.decode(prompt_ids(TOKENIZER, [SYSTEM, USER])) == (
        "<|im_start|>system\ntools: x<|im_end|>\n<|im_start|>user\nask ann<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.decode(tool_result_ids(TOKENIZER, "7")) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_history_has_the_ids_that_a_rollout_appends() -> None:
    call = render_call("look", {"who": "ann"})
    appended = prompt_ids(TOKENIZER, [SYSTEM, USER])
    appended += [*TOKENIZER.encode(call), TOKENIZER.turn_end_id]
    appended += tool_result_ids(TOKENIZER, "ok")
    history = [
        SYSTEM,
        USER,
        Message(role="assistant", content=call),
        Message(role="tool", content="ok"),
    ]
    assert prompt_ids(TOKENIZER, history) == appended


def test_the_jinja_template_renders_the_same_text() -> None:
    messages = [
        SYSTEM,
        USER,
        Message(role="assistant", content="hm"),
        Message(role="tool", content="ok"),
        USER,
    ]
    rendered = (
        jinja2.Environment()
        .from_string(CHAT_TEMPLATE)
        .render(
            messages=[{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=True,
        )
    )
    assert TOKENIZER.decode(prompt_ids(TOKENIZER, messages)) == rendered


@given(st.lists(st.sampled_from([TURN_START, TURN_END, PAD, *GLUE, "ann", "x"])).map("".join))
def test_forged_markers_open_no_turn(text: str) -> None:
    def specials(content: str) -> list[int]:
        ids = prompt_ids(
            TOKENIZER,
            [Message(role="system", content=content), Message(role="user", content=content)],
        )
        return [i for i in ids + tool_result_ids(TOKENIZER, content) if i in TOKENIZER.special_ids]

    assert specials(text) == specials("plain")


def test_tool_schemas_are_listed_in_the_system_turn() -> None:
    schema = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for messages in ([SYSTEM, USER], [USER]):
        text = TOKENIZER.decode(prompt_ids(TOKENIZER, messages, [schema]))
        assert text.startswith("<|im_start|>system\n")
        assert f"<tools>\n{json.dumps(schema)}\n</tools>" in text
    assert not TOKENIZER.decode(prompt_ids(TOKENIZER, [USER])).startswith("<|im_start|>system")


@pytest.mark.parametrize("messages", [[], [USER, SYSTEM]])
def test_a_prompt_out_of_order_is_refused(messages: list[Message]) -> None:
    with pytest.raises(ValueError, match="message"):
        prompt_ids(TOKENIZER, messages)


def test_rendered_calls_have_default_json_spacing() -> None:
    assert render_call("calc", {"expression": "17+5", "n": 3}) == (
        '<tool_call>\n{"name": "calc", "arguments": {"expression": "17+5", "n": 3}}\n</tool_call>'
    )


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), ARGUMENTS)
def test_a_rendered_call_parses_to_itself(name: str, arguments: dict[str, object]) -> None:
    parsed = parse_turn("(a)" + render_call(name, arguments))
    assert parsed == ToolCall(name=name, arguments=arguments, text_before="(a)")


def test_a_turn_without_a_call_is_final() -> None:
    assert parse_turn("ANSWER: 3") == FinalAnswer(text="ANSWER: 3")
    assert parse_turn("</tool_call>") == FinalAnswer(text="</tool_call>")


def test_a_marker_inside_a_string_is_text() -> None:
    parsed = parse_turn(render_call("write", {"text": "<tool_call>{}</tool_call>"}))
    assert parsed == ToolCall(name="write", arguments={"text": "<tool_call>{}</tool_call>"})


GOOD = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        f"<tool_call>{GOOD}",
        f"<tool_call>{GOOD}</tool_call> and more",
        f"<tool_call>{GOOD}</tool_call><tool_call>{GOOD}</tool_call>",
        f"<tool_call>{GOOD}{GOOD}</tool_call>",
        f"<tool_call>[{GOOD}]</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ["\\ud800"]}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 20 + "]" * 20 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": '
        + "[" * 30000
        + "]" * 30000
        + "}}</tool_call>",
        "<tool_call>" + "x" * 70000,
    ],
)
def test_anything_else_with_an_opening_tag_is_malformed(text: str) -> None:
    parsed = parse_turn(text)
    assert isinstance(parsed, MalformedCall)
    assert parsed.reason


@pytest.mark.long
@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["<tool_call>", "</tool_call>", GOOD, '{"name"', "\n"]), st.text()
        )
    ).map("".join)
)
def test_no_text_raises(text: str) -> None:
    assert isinstance(parse_turn(text), ToolCall | FinalAnswer | MalformedCall)


@pytest.mark.parity
def test_transformers_builds_the_same_prompt(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    TOKENIZER.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    conversation = [{"role": m.role, "content": m.content} for m in (SYSTEM, USER)]
    ids = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_ids(TOKENIZER, [SYSTEM, USER])


@pytest.fixture
def thinking(tmp_path: Path) -> Tokenizer:
    """Our closed tokenizer with the marker of a model that thinks aloud."""
    library = tokenizers.Tokenizer.from_file(saved(TOKENIZER, tmp_path))
    library.add_tokens(["<think>", "</think>"])
    return Tokenizer(library.to_str())


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    tokenizer.save(folder)
    return str(folder / "tokenizer.json")


def test_a_model_that_thinks_aloud_is_kept_from_it(thinking: Tokenizer) -> None:
    assert thinking.layout.name == "qwen3"
    opening = prompt_ids(thinking, [SYSTEM, USER])
    assert thinking.decode(opening).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    call = render_call("f", {})
    history = [
        SYSTEM,
        USER,
        Message(role="assistant", content=call),
        Message(role="tool", content="3"),
    ]
    appended = [
        *opening,
        *thinking.encode(call),
        thinking.turn_end_id,
        *tool_result_ids(thinking, "3"),
    ]
    assert prompt_ids(thinking, history) == appended


@pytest.mark.parity
def test_the_saved_template_of_a_model_that_thinks_aloud(
    thinking: Tokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    thinking.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    turns = [("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "3")]
    text = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        tokenize=False,
    )
    ours = prompt_ids(thinking, [Message(role=role, content=text) for role, text in turns])
    assert text == thinking.decode(ours)
