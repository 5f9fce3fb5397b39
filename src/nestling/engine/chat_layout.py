"""How a model's conversations are marked up: which tokens open and close turns, and what roles are called.

A layout is recognised by the tokens of a vocabulary, so a model folder needs no setting for it. Tool calls are
the Hermes ones in every layout; see `engine.chat`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["CHATML", "GEMMA", "LAYOUTS", "QWEN3", "ChatLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLayout:
    """One markup."""

    name: str
    turn_start: str
    turn_end: str
    """The token that ends a sampled turn."""
    pad: str
    opening: str = ""
    """Before the first turn of every conversation."""
    assistant: str = "assistant"
    """What the model's own turns are called."""
    has_system: bool = True
    """False: what the system says opens the first turn of the user."""
    no_thoughts: str = ""
    """Opens the model's own turns behind the header, so that a model that thinks aloud does not."""
    marker: str = ""
    """A token that tells this layout from another with the same turns."""
    template: str
    """The dialect as a Jinja template, for other software that loads the folder."""

    def header(self, role: str) -> str:
        """What opens a turn; `role` is `system`, `user` or `assistant`."""
        if role == "assistant":
            return f"{self.turn_start}{self.assistant}\n{self.no_thoughts}"
        return f"{self.turn_start}{role}\n"


CHATML: Final = ChatLayout(
    name="chatml",
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    pad="<|endoftext|>",
    template=(
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content"
        " + '\\n</tool_response><|im_end|>\\n' }}"
        "{%- else %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
)
"""Qwen2, SmolLM2 and the models of this package."""

_NO_THOUGHTS: Final = "<think>\n\n</think>\n\n"

QWEN3: Final = replace(
    CHATML,
    name="qwen3",
    no_thoughts=_NO_THOUGHTS,
    marker="<think>",
    template=CHATML.template.replace(
        "'<|im_start|>' + message.role + '\\n' + message.content",
        "'<|im_start|>' + message.role + '\\n' + (no_thoughts if message.role == 'assistant' else '')"
        " + message.content",
    )
    .replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n' + no_thoughts }}")
    .replace("{%- for", "{%- set no_thoughts = '<think>\\n\\n</think>\\n\\n' %}{%- for", 1),
)
"""The same turns, thoughts left out as its own template does with `enable_thinking = false`; here in earlier turns
too, since history is appended and never rendered again. Source: the chat template of Qwen/Qwen3-0.6B."""

GEMMA: Final = ChatLayout(
    name="gemma",
    turn_start="<start_of_turn>",
    turn_end="<end_of_turn>",
    pad="<pad>",
    opening="<bos>",
    assistant="model",
    has_system=False,
    template=(
        "{{- '<bos>' }}"
        "{%- set first = namespace(text='') %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'system' %}{%- set first.text = message.content + '\\n\\n' %}"
        "{%- elif message.role == 'tool' %}"
        "{{- '<start_of_turn>user\\n<tool_response>\\n' + message.content"
        " + '\\n</tool_response><end_of_turn>\\n' }}"
        "{%- else %}"
        "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role)"
        " + '\\n' + first.text + message.content + '<end_of_turn>\\n' }}"
        "{%- set first.text = '' %}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
    ),
)
"""Gemma 3; its template knows no system turn. Source: the chat template of google/gemma-3-270m-it."""

LAYOUTS: Final = (QWEN3, CHATML, GEMMA)
"""The first one that fits is taken."""
