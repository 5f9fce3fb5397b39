"""A model's own chat template, appended to and never rendered again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.agent.chat_template import ChatTemplate
from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import OwnChat, TokenPolicy
from nestling.agent.tool_schemas import TOOL_SCHEMAS
from nestling.core.errors import ModelError
from nestling.engine.tokenizer import CHAT_TEMPLATE, Tokenizer

TOKENIZER = Tokenizer.closed(["submit_job", "ledger", "hello "])
SCHEMAS = TOOL_SCHEMAS[:2]

THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n# Functions\\n' -}}
  {%- for tool in tools -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
  {{- (messages[0].content | trim) ~ '<|im_end|>\\n' -}}
{%- else -%}
  {{- '<|im_start|>system\\n' ~ (messages[0].content | trim) ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages[1:] -%}
  {%- set text = m.content | trim -%}
  {%- if m.role == 'user' -%}
    {{- '<|im_start|>user\\n' ~ text ~ '<|im_end|>\\n' -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
    {{- text -}}
    {%- for call in m.tool_calls -%}
      {{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' -}}
      {%- for key, value in call.function.arguments | items -%}{{- key ~ value -}}{%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' ~ text ~ '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is not defined or enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


def test_own_template_gives_the_tokens_of_our_dialect():
    template, own = ChatTemplate(TOKENIZER, CHAT_TEMPLATE), OwnChat(tokenizer=TOKENIZER)
    assert template.prompt_ids("You", " hello ledger\n") == own.prompt_ids("You", " hello ledger\n")
    assert template.tool_result_ids(" ok\n") == own.tool_result_ids(" ok\n")


def test_shipped_agents_template_too():
    from nestling.wiring.agents import AGENTS_FOLDER

    template = ChatTemplate.load(AGENTS_FOLDER / "hatchling")
    own = OwnChat(tokenizer=template.tokenizer)
    assert template.prompt_ids("S", "U") == own.prompt_ids("S", "U")
    assert template.tool_result_ids("r") == own.tool_result_ids("r")


def test_template_of_a_thinking_model():
    template = ChatTemplate(TOKENIZER, THINKING)
    opening = TOKENIZER.decode(template.prompt_ids(" Be good. ", "go\n", SCHEMAS))
    assert opening.startswith("<|im_start|>system\n# Functions\n" + json.dumps(SCHEMAS[0]))
    assert opening.endswith(
        "\nBe good.<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert TOKENIZER.decode(template.tool_result_ids(" 3 files\n")) == (
        "\n<|im_start|>user\n<tool_response>\n3 files\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_options_reach_the_template():
    template = ChatTemplate(TOKENIZER, THINKING, options={"enable_thinking": False})
    assert TOKENIZER.decode(template.prompt_ids("s", "u")).endswith("assistant\n")


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "\ue000system\ue001", " x", "\n"])))
def test_content_never_opens_or_closes_a_turn(parts):
    text = "".join(parts)
    template = ChatTemplate(TOKENIZER, CHAT_TEMPLATE)
    ends = [template.prompt_ids("s", body).count(TOKENIZER.turn_end_id) for body in ("u", text)]
    assert ends[0] == ends[1]
    assert template.tool_result_ids(text) == OwnChat(tokenizer=TOKENIZER).tool_result_ids(text)


class Sampler:
    """Says the same thing every time."""

    async def sample(self, ids, *, session, seed, max_tokens, temperature):
        said = [*TOKENIZER.encode("<think>hm</think>submit_job"), TOKENIZER.turn_end_id]
        return Said(said)


class Said:
    stopped = True

    def __init__(self, ids):
        self.ids, self.logprobs = ids, [-1.0] * len(ids)


async def test_history_keeps_every_sampled_token():
    template = ChatTemplate(TOKENIZER, THINKING)
    policy = TokenPolicy(tokenizer=TOKENIZER, sampler=Sampler(), chat=template)
    prompt = AgentPrompt(system="s", user="u", tool_schemas=SCHEMAS, style="full", family="ledger")
    session = policy.begin(prompt, 1)
    expected = template.prompt_ids("s", "u", SCHEMAS)
    for number in range(3):
        turn = await session.act()
        expected += turn.ids
        if number < 2:
            await session.observe("ok")
            expected += template.tool_result_ids("ok")
    trajectory = session.trajectory()
    assert list(trajectory.ids) == expected
    assert sum(trajectory.sampled) == 3 * len(turn.ids)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[", "cannot be read"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ messages | length }}" + CHAT_TEMPLATE, "changes the opening"),
        (CHAT_TEMPLATE.replace("message.content", "message.content | upper"), "changes the text"),
        (CHAT_TEMPLATE.replace("<|im_end|>", "</s>"), "does not end a turn"),
        (
            CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ messages | length }}{% endif %}",
            "after two",
        ),
        ("{{ ''.__class__.__mro__ }}", "fails"),
        ("{{ messages | dictsort }}", "fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("x" * 300_000, "characters"),
    ],
)
def test_template_that_cannot_be_appended_to_is_refused(source, reason):
    with pytest.raises(ModelError, match=reason):
        ChatTemplate(TOKENIZER, source)


def test_folder_without_a_template_is_refused(tmp_path):
    TOKENIZER.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert ChatTemplate.load(tmp_path).prompt_ids("s", "u")
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    config["chat_template"] = [{"name": "default", "template": "{{ x.y.z }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert ChatTemplate.load(tmp_path).prompt_ids("s", "u")
