"""A tiny real base model, the stand-in for prime-rl, and jobs that need no framework."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nestling.core.clock import Clock
from nestling.engine.checkpoint import Model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.vocabulary import tokenizer
from nestling.inner.prime_rl_config import PrimeRlConfig
from nestling.inner.trainer import TrainLimits, TrainRequest
from nestling.inner.trainers.prime_rl import PrimeRlTrainer
from nestling.jobs.bounds import LARGE
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, render_manifest

STANDIN = Path(__file__).with_name("standin_rl.py")
PACKAGE = '__all__ = ["Taskset"]\n\n\nclass Taskset:\n    """Stands for a task set."""\n'


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    words = tokenizer()
    config = ModelConfig(
        vocab_size=words.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(1))
    save_model(folder, Model(config=config, weights=weights, tokenizer=words))
    return folder


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bin") / "rl"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def make_request(base: Path, tmp_path: Path) -> Callable[..., TrainRequest]:
    def make(*, package: str = PACKAGE, wall_s: float = 60.0, **settings: Any) -> TrainRequest:
        manifest = JobManifest.build(
            "qwen3-0.6b",
            bounds=LARGE,
            **({"max_steps": 2, "batch_size": 16, "group_size": 4, "lora_rank": 4} | settings),
        )
        files = {
            "job.toml": render_manifest(manifest).encode(),
            "environment/__init__.py": package.encode(),
        }
        return TrainRequest(
            bundle=Bundle.from_files(files),
            manifest=manifest,
            family="calc_chain",
            base_folder=base,
            out_folder=tmp_path / "models" / "out",
            seed=0,
            limits=TrainLimits(wall_s=wall_s),
        )

    return make


@pytest.fixture
def make_trainer(program: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PrimeRlTrainer]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(
        fault: str = "",
        *,
        clock: Clock | None = None,
        hidden: tuple[Path, ...] = (),
        **settings: Any,
    ) -> PrimeRlTrainer:
        monkeypatch.setenv("STANDIN_FAULT", fault)
        given = {"program": str(program), "poll_s": 0.01, "passed_on": ("STANDIN_FAULT",)}
        given |= {"veil": False}
        return PrimeRlTrainer(
            PrimeRlConfig.model_validate(given | settings), hidden=hidden, clock=clock
        )

    return make
