"""Other implementations of the work in `engine_work`, where they are installed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nestling.bench.engine_work import Workload
from nestling.core.errors import ConfigError

__all__ = [
    "Seconds",
    "TransformersPeer",
    "clock",
    "grpo_config",
    "has_transformers",
    "has_trl",
    "load_peer_model",
    "sample_tokens",
    "sample_turns",
    "since",
    "trl_grpo",
]


class Seconds(NamedTuple):
    """Of this process on a processor, and of the clock on the wall."""

    cpu: float
    wall: float


def clock() -> Seconds:
    """Readings to be subtracted."""
    return Seconds(time.process_time(), time.perf_counter())


def since(before: Seconds) -> Seconds:
    """What passed since a reading."""
    now = clock()
    return Seconds(now.cpu - before.cpu, now.wall - before.wall)


def has_transformers() -> bool:
    """Whether transformers can be imported."""
    return find_spec("transformers") is not None


def has_trl() -> bool:
    """Whether TRL and transformers can be imported."""
    return find_spec("trl") is not None and has_transformers()


class TransformersPeer:
    """`generate` and training by transformers on the same weights."""

    def __init__(self, workload: Workload) -> None:
        self._work = workload.work
        self._model = load_peer_model(workload.folder).eval()
        self._trained = load_peer_model(workload.folder).train()
        self._optim = torch.optim.AdamW(self._trained.parameters(), lr=1e-5)
        self._prompts = torch.tensor(workload.prompts)
        self._tool = torch.tensor(workload.tool).expand(self._work.rows, -1)
        self._rows = torch.tensor([row.ids for row in workload.train_rows])

    def decode(self) -> None:
        """A prompt and its new tokens."""
        sample_tokens(self._model, self._prompts, self._work.new_tokens)

    def multi_turn(self) -> None:
        """The same number of new tokens in turns, a tool's answer between them."""
        sample_turns(
            self._model,
            self._prompts,
            self._tool,
            turns=self._work.turns,
            turn_tokens=self._work.turn_tokens,
        )

    def train(self) -> float:
        """Forward, backward, clip and AdamW over all rows."""
        loss = self._trained(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
        self._optim.step()
        self._optim.zero_grad()
        return float(loss.detach())


@torch.inference_mode()
def sample_tokens(model: Any, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: ANN401
    """Rows of `ids` with as many tokens after each, by its `generate` at temperature 1; no end token."""
    out: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out


def sample_turns(
    model: Any,  # noqa: ANN401
    ids: torch.Tensor,
    tool: torch.Tensor,
    *,
    turns: int,
    turn_tokens: int,
) -> torch.Tensor:
    """One `generate` per turn over the whole conversation, as its interface offers it; `tool` between two."""
    for turn in range(turns):
        if turn:
            ids = torch.cat((ids, tool), 1)
        ids = sample_tokens(model, ids, turn_tokens)
    return ids


def trl_grpo(
    workload: Workload, runs: int, ours: Callable[[], object], *, device: str = "cpu"
) -> tuple[list[Seconds], list[Seconds]]:
    """`runs` steps of TRL's GRPOTrainer, and as many of ours, one after each of them.

    Completions have the same number and length; a first step of each is not counted. The reward sees texts.
    """
    datasets, trl = import_module("datasets"), import_module("trl")
    transformers = import_module("transformers")
    work = workload.work
    tokenizer = transformers.AutoTokenizer.from_pretrained(workload.folder)
    model = load_peer_model(workload.folder)
    texts = [workload.model.tokenizer.decode(ids) for ids in workload.prompts]
    if tokenizer(texts)["input_ids"] != workload.prompts:
        raise ConfigError("the peer reads other prompt tokens; expected the same ones")
    theirs_s: list[Seconds] = []
    ours_s: list[Seconds] = []
    started = clock()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            nonlocal started
            started = clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            theirs_s.append(since(started))
            before = clock()
            ours()
            ours_s.append(since(before))

    def reward(completions: list[str], **_: Any) -> list[float]:  # noqa: ANN401
        return [float(len(text) % 7) for text in completions]

    with tempfile.TemporaryDirectory(prefix="nestling-trl-") as folder:
        config = grpo_config(
            trl,
            folder,
            rows=work.rows,
            group_size=work.group_size,
            completion_tokens=work.new_tokens,
            steps=runs + 1,
            device=device,
            generation_kwargs={"min_new_tokens": work.new_tokens},
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return theirs_s[1:], ours_s[1:]


def grpo_config(
    trl: Any,  # noqa: ANN401
    folder: str,
    *,
    rows: int,
    group_size: int,
    completion_tokens: int,
    steps: int,
    device: str = "cpu",
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """TRL's settings for one batch of `rows` per step, at temperature 1 and in float32."""
    return trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        num_generations=group_size,
        max_completion_length=completion_tokens,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        use_cpu=device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def load_peer_model(folder: Path, device: str = "cpu") -> Any:  # noqa: ANN401
    """The same weights as a transformers model: in bfloat16 on a GPU, else in float32."""
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=kind).to(device)
