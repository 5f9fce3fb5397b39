"""TRL's GRPOTrainer on the conversations of `engine_tools`: the same tokens, turns and tool calls.

TRL plays with its own loop: `generate` once per turn, its parser, an environment per row whose methods are the
family's tools. A logits processor leaves one token possible at every step, the one that our row had there; sampling,
tool calls and training are TRL's own. The bases' tokenizer joins a turn's end and the next header into one token, so
what follows a sampled end is taken from the engine in place of TRL's two renderings of a dummy conversation.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from nestling.bench.engine_tools import ToolWorkload
from nestling.bench.peers import Seconds, clock, grpo_config, load_peer_model, since
from nestling.core.errors import ConfigError
from nestling.engine.chat import tool_result_ids
from nestling.engine.sampler import Rollout
from nestling.families.family import Family

__all__ = ["trl_tool_grpo"]

_TEMPLATE = r"""
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""TRL wants a template that renders calls as well; the bases' own takes messages whose text holds them."""


def trl_tool_grpo(workload: ToolWorkload, runs: int) -> tuple[list[Seconds], list[Seconds]]:
    """`runs` steps of TRL and as many of ours, one before each of them; a first of each is not counted.

    ConfigError when TRL's conversations were not ours.
    """
    datasets, trl = import_module("datasets"), import_module("trl")
    transformers = import_module("transformers")
    templates = import_module("trl.chat_template_utils")
    tokenizer = transformers.AutoTokenizer.from_pretrained(workload.folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.response_template = templates.qwen3_template  # the Hermes dialect that bases speak
    model = load_peer_model(workload.folder)
    script = _Script(tokenizer.pad_token_id, tokenizer.eos_token_id)
    generate = model.generate
    model.generate = lambda *args, **named: generate(*args, **named, logits_processor=[script])
    theirs: list[Seconds] = []
    ours: list[Seconds] = []
    started = clock()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            nonlocal started
            before = clock()
            workload.grpo()
            ours.append(since(before))
            script.follow(workload.played)
            started = clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            theirs.append(since(started))

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
            return tool_result_ids(workload.model.tokenizer, tool_messages[0]["content"])

    def reward(completions: list[Any], **_: Any) -> list[float]:  # noqa: ANN401
        return [float(len(str(one)) % 7) for one in completions]

    with (
        tempfile.TemporaryDirectory(prefix="nestling-trl-") as folder,
        _any_template(import_module("trl.trainer.grpo_trainer")),
    ):
        config = grpo_config(
            trl,
            folder,
            rows=len(workload.items) * workload.group_size,
            group_size=workload.group_size,
            completion_tokens=workload.params.max_total_tokens,
            steps=runs + 1,
            shuffle_dataset=False,
        )
        trainer = Trainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(
                [
                    {
                        "prompt": [
                            {"role": "system", "content": item.system_prompt},
                            {"role": "user", "content": item.prompt},
                        ],
                        "index": index,
                    }
                    for index, item in enumerate(workload.items)
                ]
            ),
            processing_class=tokenizer,
            environment_factory=_environment(workload),
            callbacks=[Clock()],
        )
        trainer.train()
    if script.num_strayed:
        raise ConfigError(
            f"{script.num_strayed} turns of the peer follow none of our conversations; "
            "expected the same prompts, tool results and turn ends"
        )
    return theirs[1:], ours[1:]


@contextmanager
def _any_template(module: Any) -> Iterator[None]:  # noqa: ANN401
    """TRL does not compare renderings of a call with and without its result meanwhile."""
    check = module.is_chat_template_prefix_preserving
    module.is_chat_template_prefix_preserving = lambda _: True
    try:
        yield
    finally:
        module.is_chat_template_prefix_preserving = check


class _Script:
    """A logits processor under which rows repeat given conversations."""

    def __init__(self, pad_id: int, end_id: int) -> None:
        self._pad_id, self._end_id = pad_id, end_id
        self._rollouts: list[Rollout] = []
        self._spans: list[list[int]] = []
        self._first = self._length = 0
        self.num_strayed = 0

    def follow(self, rollouts: list[Rollout]) -> None:
        """Take these conversations for the next step."""
        self._rollouts, self._length = rollouts, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] != self._length + 1 or len(self._spans) != len(ids):
            self._spans = self._turns(ids.tolist())
            self._first = ids.shape[1]
        self._length = ids.shape[1]
        at = self._length - self._first
        wanted = [span[at] if at < len(span) else self._end_id for span in self._spans]
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, torch.tensor(wanted)[:, None], 0.0)

    def _turns(self, rows: list[list[int]]) -> list[list[int]]:
        """What each row of a new `generate` has to say; rows of one history may take each other's."""
        unused = list(self._rollouts)
        found: list[list[int]] = []
        for row in rows:
            start = next(i for i, token in enumerate(row) if token != self._pad_id)
            history = row[start:]
            size = len(history)
            match = next(
                (
                    i
                    for i, one in enumerate(unused)
                    if len(one.ids) > size and one.ids[:size] == history
                ),
                None,
            )
            if match is None:
                self.num_strayed += 1
                found.append([])
                continue
            one = unused.pop(match)
            end = size
            while end < len(one.ids) and one.sampled[end]:
                end += 1
            found.append(one.ids[size:end])
        return found


def _environment(workload: ToolWorkload) -> type:
    """A class as TRL expects: `reset` with a row's columns, and one documented method per tool."""
    family = workload.family

    class Environment:
        def reset(self, index: int, **_: Any) -> None:  # noqa: ANN401
            self._item = workload.items[index]
            self._state = family.start(self._item)

    for name, arguments in workload.signatures.items():
        setattr(Environment, name, _tool(family, name, arguments))
    return Environment


def _tool(family: Family, name: str, arguments: Mapping[str, type]) -> Callable[..., str]:
    def tool(self: Any, **given: Any) -> str:  # noqa: ANN401
        return family.call(self._item, self._state, name, given)

    listed = "".join(f"\n    {argument}: given" for argument in arguments)
    tool.__name__, tool.__doc__ = name, f"{name}\n\nArgs:{listed}\n"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    parameters += [
        inspect.Parameter(argument, kind, annotation=type_) for argument, type_ in arguments.items()
    ]
    tool.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    tool.__annotations__ = {**arguments, "return": str}
    return tool
