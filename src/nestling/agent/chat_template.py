"""A large model's own chat template, used so that history is appended and never rendered again.

The Jinja template of a Hugging Face folder is run in a sandbox with stand-ins in place of the texts.
What it puts around them is glue: it is encoded as markup, the texts are encoded as plain content, so
that no file an agent reads can open or close a turn. The opening of an episode is rendered once; from
then on only the template's own answer to "a tool has replied" is appended to what was sampled.

That is right only for templates that grow by appending. Loading checks it: the opening must stay a
prefix of longer conversations, and the glue around a tool result must not depend on what came before.
Thinking that a template would cut out of earlier turns simply stays, token for token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nestling.core.errors import ModelError
from nestling.engine.tokenizer import TURN_END, Tokenizer

__all__ = ["ChatTemplate"]

_MAX_TEMPLATE_CHARS: Final = 200_000
_BLANKS: Final = "\t \t"
"""Blanks no glue has, to find out whether the template trims a text."""
_STAND_IN: Final = re.compile("\ue000([a-z0-9]+)\ue001")
_FAULTS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, RecursionError),
)
"""What a template may raise: Jinja's own errors, and those of the filters and macros it calls."""
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

_Message = dict[str, Any]


class ChatTemplate:
    """Opening and continuation of a conversation as token ids; stateless, safe to share."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        tokens: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """From the template's text; `tokens` are named ones (`bos_token`), `options` its switches.

        Raises:
            ModelError: the template cannot be read or run, or does not grow by appending.
        """
        self.tokenizer = tokenizer
        self._variables = {**(tokens or {}), **(options or {})}
        self._template = _compile(source)
        self._trims = {role: self._finds_trim(role) for role in ("system", "user", "tool")}
        self._before_result, self._after_result = self._continuation()

    @classmethod
    def load(cls, folder: str | Path, options: Mapping[str, Any] | None = None) -> ChatTemplate:
        """From a local folder with a model's `tokenizer.json` and `tokenizer_config.json`.

        A file `chat_template.jinja` goes before the template in the configuration.

        Raises:
            ModelError: a file is missing or damaged, or as for the constructor.
        """
        root = Path(folder)
        config = _read_config(root / "tokenizer_config.json")
        source = _source(root, config)
        tokens = {
            name: token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := _token(config.get(name))) is not None
        }
        try:
            return cls(Tokenizer.load(root), source, tokens=tokens, options=options)
        except ModelError as error:
            raise ModelError(f"{root}: {error}") from error

    def prompt_ids(
        self, system: str, user: str, tool_schemas: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the opening up to and including what the template puts before the first turn."""
        shown = self._render(
            [_message("system", "system"), _message("user", "user")], tool_schemas, prompt=True
        )
        return self._encode(shown, {"system": system, "user": user})

    def tool_result_ids(self, content: str) -> list[int]:
        """What follows a sampled turn end: the tool's answer and the opening of the next turn."""
        tokenizer = self.tokenizer
        return [
            *tokenizer.encode_markup(self._before_result),
            *tokenizer.encode(self._shown("tool", content)),
            *tokenizer.encode_markup(self._after_result),
        ]

    def _encode(self, shown: str, texts: Mapping[str, str]) -> list[int]:
        """Glue as markup, texts as content; every stand-in must occur exactly once."""
        pieces = _STAND_IN.split(shown)
        found = pieces[1::2]
        for role in texts:
            if found.count(role) != 1:
                raise ModelError(
                    f"the chat template shows the {role} message {found.count(role)} times; "
                    "expected once; use a template with system messages and tools"
                )
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += self.tokenizer.encode(self._shown(piece, texts[piece]))
            elif piece:
                ids += self.tokenizer.encode_markup(piece)
        return ids

    def _shown(self, role: str, text: str) -> str:
        return text.strip() if self._trims[role] else text

    def _continuation(self) -> tuple[str, str]:
        """Glue before and after a tool result, the same after one turn as after two."""
        opening = [_message("system", "system"), _message("user", "user")]
        first = [*opening, _call("turn1"), _message("tool", "tool1")]
        second = [*first, _call("turn2"), _message("tool", "tool2")]
        tools = [_PROBE_TOOL]
        start = self._render(opening, tools, prompt=False)
        short = self._render(first, tools, prompt=True)
        long = self._render(second, tools, prompt=True)
        for shown in (self._render(opening, tools, prompt=True), short, long):
            if not shown.startswith(start):
                raise ModelError(
                    "the chat template changes the opening once the conversation goes on; expected "
                    "one that only appends; use the template of a model trained for tool use"
                )
        around = _around(short, "1")
        if around != _around(long, "2"):
            raise ModelError(
                "the chat template puts a tool result differently after one turn and after two; "
                "expected the same glue every time; use another template for this model"
            )
        return around

    def _finds_trim(self, role: str) -> bool:
        """Whether the template strips the texts of this role."""
        messages = [_message("system", "system"), _message("user", "user")]
        if role == "tool":
            messages += [_call("turn"), _message("tool", "tool")]
        marked = messages[{"system": 0, "user": 1, "tool": 3}[role]]
        text = str(marked["content"])
        marked["content"] = f"{_BLANKS}{text}{_BLANKS}"
        shown = self._render(messages, [_PROBE_TOOL], prompt=True)
        if f"{_BLANKS}{text}{_BLANKS}" in shown:
            return False
        if f"\t{text}" in shown or f"{text}\t" in shown or text not in shown:
            raise ModelError(
                f"the chat template changes the text of a {role} message; expected it as it is, or "
                "without blanks at both ends; use another template for this model"
            )
        return True

    def _render(
        self,
        messages: Sequence[_Message],
        tools: Sequence[dict[str, Any]] | None,
        *,
        prompt: bool,
    ) -> str:
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except _FAULTS as error:
            raise ModelError(
                f"the chat template fails: {error}; expected one that takes a system message, a user "
                "message, a tool call and its result; use the template that came with the model"
            ) from error


def _message(role: str, name: str) -> _Message:
    return {"role": role, "content": f"\ue000{name}\ue001"}


def _call(name: str) -> _Message:
    """An assistant turn that called a tool: some templates refuse a result without a call."""
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}
    return {"role": "assistant", "content": f"\ue000{name}\ue001", "tool_calls": [call]}


def _around(shown: str, number: str) -> tuple[str, str]:
    """What is between the end of turn `number` and its tool result, and what comes after that."""
    _, turn, rest = shown.partition(f"\ue000turn{number}\ue001")
    _, end, rest = rest.partition(TURN_END)
    before, result, after = rest.partition(f"\ue000tool{number}\ue001")
    if not (turn and end and result) or "\ue000" in before + after:
        raise ModelError(
            f"the chat template does not end a turn with {TURN_END} followed by the tool's result; "
            "expected turns in the style of Qwen and Hermes; use such a model"
        )
    return before, after


def _compile(source: str) -> jinja2.Template:
    if len(source) > _MAX_TEMPLATE_CHARS:
        raise ModelError(
            f"the chat template has {len(source)} characters; expected at most "
            f"{_MAX_TEMPLATE_CHARS}; check the file"
        )
    # The settings and names that templates are written for (transformers 5).
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the chat template cannot be read: {error}; expected Jinja; take the file from the model"
        ) from error


def _to_json(value: Any, indent: int | None = None, **_: object) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path}: {error}; expected a JSON object; point to a complete model folder"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object; take the file from the model")
    return config


def _source(root: Path, config: Mapping[str, Any]) -> str:
    """The template: a file of its own, or one in the configuration, plain or by name."""
    path = root / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}; expected UTF-8 text") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("tool_use", named.get("default"))
    if not isinstance(found, str):
        raise ModelError(
            f"{root} has no chat template; expected chat_template.jinja or the entry chat_template of "
            "tokenizer_config.json; download it with the tokenizer"
        )
    return found


def _token(value: object) -> str | None:
    """A named token, in either of its two forms."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
