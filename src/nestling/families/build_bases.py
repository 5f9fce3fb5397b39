"""Build the base models from nothing: clean demonstrations, then noise set on the model itself.

Stages leave their results in a work folder, so that a build may be stopped or killed at any time and
called again: clean weights (with optimiser state while under way), one folder per swept or refitted
noise setting, the final scores. Several noise settings are trained as one stack of J models.
Needs numpy, torch, tokenizers, safetensors and pydantic, nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import load_model, load_weights, save_model, save_weights
from nestling.engine.learn import AdamW, SupervisedTrainer, TrainRow
from nestling.engine.model import Model
from nestling.engine.weights import Weights, num_parameters
from nestling.families.base_card import LICENCE, render_card, wilson
from nestling.families.base_recipe import RECIPES, BaseRecipe, recipe
from nestling.families.bases import WEIGHTS_FOLDER, write_catalog
from nestling.families.calibration import Point, miss, next_noise
from nestling.families.corpus import Corpus, generate
from nestling.families.item_play import scores
from nestling.families.vocabulary import tokenizer

__all__ = ["BuildConfig", "build", "build_all", "main"]

Log = Callable[[dict[str, Any]], None]
Result = Literal["done", "paused"]


class BuildConfig(Frozen):
    """Where and how fast to build; nothing here changes what is built."""

    out: Path = WEIGHTS_FOLDER
    work: Path
    device: str = "cpu"
    processes: int = Field(1, ge=1)
    """For making demonstrations."""
    stack: int = Field(1, ge=1)
    """Noise settings trained as one batch; 4 to 8 suit a GPU, 1 a CPU."""
    max_rows: int | None = None
    """Rows decoded at once per model."""
    deadline_s: float | None = Field(None, gt=0)
    """Stop at the next step after this long and return `paused`."""
    snapshot_items: int = Field(0, ge=0)
    """Items per family scored at quarters of the clean stage, for the log; 0: none."""
    command: str = "nestling models build"


class _Paused(Exception):  # noqa: N818 (not an error: the build continues when called again)
    """The deadline has passed; everything needed to go on is on disk."""


def build_all(config: BuildConfig, recipes: Sequence[BaseRecipe], log: Log, clock: Clock) -> Result:
    """Build every recipe in turn; call again after `paused`."""
    end = None if config.deadline_s is None else clock.monotonic() + config.deadline_s
    with _executor(config.processes) as executor:
        for one in recipes:
            try:
                _Build(config, one, log, clock, end, executor).run()
            except _Paused:
                log({"event": "paused", "model": one.name})
                return "paused"
    return "done"


def build(config: BuildConfig, one: BaseRecipe, log: Log, clock: Clock) -> Result:
    """Build one recipe; call again after `paused`."""
    return build_all(config, [one], log, clock)


class _Build:
    """One recipe on its way through the stages."""

    def __init__(
        self,
        config: BuildConfig,
        one: BaseRecipe,
        log: Log,
        clock: Clock,
        end: float | None,
        executor: Executor | None,
    ) -> None:
        self.config, self.recipe, self.clock, self.end, self.executor = (
            config,
            one,
            clock,
            end,
            executor,
        )
        self.shape = one.model_config_of()
        self.folder = config.work / one.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.families = tuple(one.targets)
        self._log = log
        self._same_recipe()

    def run(self) -> None:
        """All stages that are not done yet."""
        clean = self._clean()
        points = self._sweep(clean)
        best = self._refit(clean, points)
        self._finish(best)

    def _clean(self) -> Weights:
        """Weights after error-free demonstrations; the stage goes on where it was stopped."""
        done = self.folder / "clean"
        if (done / "done.json").exists():
            return load_weights(done, self.config.device)
        one = self.recipe
        corpus = self._corpus("clean", dict.fromkeys(self.families, 0.0), self._clean_episodes())
        num_steps = max(1, corpus.num_episodes // one.clean_batch_episodes)
        weights = (
            Weights.init(self.shape, one.seed + 1).job(one.seed).clone().to(self.config.device)
        )
        model = Model(config=self.shape, weights=weights, tokenizer=tokenizer())
        trainer = SupervisedTrainer(model, AdamW(lr=one.clean_lr, max_norm=1.0))
        state_file = self.folder / "clean_state.npz"
        step = _load_state(trainer, state_file) if state_file.exists() else 0
        order = corpus.order(0, one.seed)
        while step < num_steps:
            if self._late():
                _save_state(trainer, state_file, step)
                raise _Paused
            batch = order[step * one.clean_batch_episodes : (step + 1) * one.clean_batch_episodes]
            rate = _rate(
                step, num_steps, one.clean_lr, one.clean_warmup_steps, one.clean_decay_share
            )
            loss = trainer.step([_row(corpus, index) for index in batch], rate)
            step += 1
            if step % max(1, num_steps // 20) == 0:
                self.log("clean", step=step, steps=num_steps, loss=round(loss, 4))
                _save_state(trainer, state_file, step)
            if self.config.snapshot_items and step % max(1, num_steps // 4) == 0:
                found = self._scores(model, self.config.snapshot_items, "snapshot")[0]
                self.log("snapshot", step=step, scores=_rounded(found))
        save_weights(done, weights)
        _write(done / "done.json", {"tokens": corpus.num_tokens, "episodes": corpus.num_episodes})
        state_file.unlink(missing_ok=True)
        return weights

    def _clean_episodes(self) -> int:
        """How many episodes hold about the wanted tokens, measured on a sample."""
        one = self.recipe
        sample = self._corpus("length", dict.fromkeys(self.families, 0.0), 600)
        episodes = round(one.clean_tokens * sample.num_episodes / sample.num_tokens)
        return max(episodes, one.clean_batch_episodes)

    def _sweep(self, clean: Weights) -> dict[str, list[Point]]:
        """Scores of models trained at each noise of the sweep, the same noise for all families."""
        points: dict[str, list[Point]] = {name: [] for name in self.families}
        settings = [self._noise(dict.fromkeys(self.families, z)) for z in self.recipe.sweep]
        for tried in self._trials("sweep", clean, settings, self.recipe.sweep_items):
            self._note(points, tried, self.recipe.sweep_items)
        return points

    def _refit(self, clean: Weights, points: dict[str, list[Point]]) -> dict[str, Any]:
        """The best of all refitted models: noise, scores and where its weights are."""
        one = self.recipe
        candidates: list[dict[str, Any]] = []
        for number, factors in enumerate(one.refits):
            center = self._noise(
                {name: next_noise(points[name], one.targets[name]) for name in self.families}
            )
            self.log("refit", round=number, noise=_rounded(center))
            settings = [{name: z * factor for name, z in center.items()} for factor in factors]
            for tried in self._trials(f"refit{number}", clean, settings, one.refit_items):
                self._note(points, tried, one.refit_items)
                candidates.append(tried)
        return min(candidates, key=lambda tried: miss(tried["scores"], self._aimed_at()))

    def _noise(self, noise: Mapping[str, float]) -> dict[str, float]:
        """None where skill is limited: GRPO takes noise away, and the score would not show the limit."""
        return {name: 0.0 if name in self.recipe.limited else z for name, z in noise.items()}

    def _aimed_at(self) -> dict[str, float]:
        """Targets that noise can reach."""
        limited = self.recipe.limited
        return {name: score for name, score in self.recipe.targets.items() if name not in limited}

    def _note(self, points: dict[str, list[Point]], tried: dict[str, Any], n: int) -> None:
        for name in self.families:
            points[name].append(Point(z=tried["noise"][name], score=tried["scores"][name], n=n))

    def _trials(
        self, stage: str, clean: Weights, settings: list[dict[str, float]], n: int
    ) -> Iterator[dict[str, Any]]:
        """Noise, scores and weights folder of each setting; groups already on disk are not repeated."""
        for start in range(0, len(settings), self.config.stack):
            group = settings[start : start + self.config.stack]
            missing = [
                self.folder / f"{stage}_{start + i}" / "done.json" for i in range(len(group))
            ]
            if not all(path.exists() for path in missing):
                self._train_group(stage, start, clean, group, n)
            for path in missing:
                yield json.loads(path.read_text())

    def _train_group(
        self, stage: str, start: int, clean: Weights, group: list[dict[str, float]], n: int
    ) -> None:
        one, jobs = self.recipe, len(group)
        corpora = [
            self._corpus(f"{stage}_{start + i}", noise, one.noisy_episodes)
            for i, noise in enumerate(group)
        ]
        weights = Weights.stack([clean] * jobs)
        model = Model(config=self.shape, weights=weights, tokenizer=tokenizer())
        trainer = SupervisedTrainer(model, AdamW(lr=one.noisy_lr, max_norm=1.0))
        orders = [
            _Order(corpus, derive_seed(one.seed, stage, start + i))
            for i, corpus in enumerate(corpora)
        ]
        losses = [0.0] * jobs
        for step in range(one.noisy_steps):
            self._pause_if_late()
            rows = [
                [_row(corpus, index) for index in order.take(one.noisy_batch_episodes)]
                for corpus, order in zip(corpora, orders, strict=True)
            ]
            rate = _rate(
                step, one.noisy_steps, one.noisy_lr, one.noisy_warmup_steps, one.noisy_decay_share
            )
            losses = trainer.step_stacked(rows, rate)
        self._pause_if_late()
        found = self._scores(model, n, stage)
        for i, noise in enumerate(group):
            folder = self.folder / f"{stage}_{start + i}"
            save_weights(folder, weights, job=i)
            tokens = round(corpora[i].num_tokens / corpora[i].num_episodes * orders[i].taken)
            result = {
                "noise": noise,
                "scores": found[i],
                "folder": folder.name,
                "loss": losses[i],
                "tokens": tokens,
            }
            self.log(stage, number=start + i, noise=_rounded(noise), scores=_rounded(found[i]))
            _write(folder / "done.json", result)

    def _finish(self, best: Mapping[str, Any]) -> None:
        """Save in half precision, score the saved folder on fresh items, write card and catalog."""
        marker = self.folder / "final.json"
        target = self.config.out / self.recipe.name
        if marker.exists() and (target / "model.safetensors").exists():
            return
        self._pause_if_late()
        weights = load_weights(self.folder / best["folder"])
        fresh = self.folder / "final"
        shutil.rmtree(fresh, ignore_errors=True)
        model = Model(config=self.shape, weights=weights, tokenizer=tokenizer())
        save_model(fresh, model, dtype=weights.flat.half().dtype)
        saved = load_model(fresh, self.config.device)
        n = self.recipe.final_items
        found = self._scores(saved, n, "final")[0]
        greedy = self._scores(saved, n, "final", temperature=0.0)[0]
        clean_tokens = json.loads((self.folder / "clean" / "done.json").read_text())["tokens"]
        params = num_parameters(self.shape)
        card = render_card(
            self.recipe,
            command=self.config.command,
            params=params,
            clean_tokens=clean_tokens,
            noisy_tokens=best["tokens"],
            noise=best["noise"],
            scores=found,
            greedy=greedy,
            machine=f"{self.config.device} ({platform.machine()})",
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fresh, target)
        write_catalog(self.config.out, self.recipe.name, params=params, licence=LICENCE)
        intervals = {name: [round(x, 4) for x in wilson(found[name], n)] for name in found}
        result = {
            "scores": found,
            "greedy": greedy,
            "intervals": intervals,
            "noise": best["noise"],
            "n": n,
            "miss": miss(found, self._aimed_at()),
        }
        self.log("final", **result)
        _write(marker, result)

    def _corpus(self, purpose: str, noise: Mapping[str, float], num_episodes: int) -> Corpus:
        seed = derive_seed(self.recipe.seed, self.recipe.name, "data", purpose)
        return generate(noise, num_episodes, seed, self.executor, self.recipe.shares)

    def _scores(
        self, model: Model, n: int, purpose: str, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        seed = derive_seed(self.recipe.seed, self.recipe.name, "items", purpose)
        rows = self.config.max_rows
        return scores(model, self.families, n, seed, temperature=temperature, max_rows=rows)

    def _same_recipe(self) -> None:
        """A work folder belongs to one recipe; mixing two would give a model of neither."""
        path, text = self.folder / "recipe.json", self.recipe.model_dump_json(indent=1)
        if path.exists() and path.read_text() != text:
            raise ConfigError(
                f"{path} is of another recipe; expected the one given; use a fresh work folder"
            )
        path.write_text(text)

    def log(self, event: str, **fields: object) -> None:
        """One line of the build log, with the seconds since the clock's start."""
        entry = {
            "event": event,
            "model": self.recipe.name,
            "clock_s": round(self.clock.monotonic(), 1),
            **fields,
        }
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._log(entry)

    def _late(self) -> bool:
        return self.end is not None and self.clock.monotonic() >= self.end

    def _pause_if_late(self) -> None:
        if self._late():
            raise _Paused


class _Order:
    """An endless shuffled order over a corpus."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self._left: list[int] = []
        self._epoch = 0
        self.taken = 0

    def take(self, count: int) -> list[int]:
        """The next `count` episode numbers."""
        while len(self._left) < count:
            self._left += self._corpus.order(self._epoch, self._seed)
            self._epoch += 1
        taken, self._left = self._left[:count], self._left[count:]
        self.taken += count
        return taken


def _row(corpus: Corpus, index: int) -> TrainRow:
    ids, sampled = corpus.episode(index)
    return TrainRow(ids=ids, sampled=sampled)


def _rate(step: int, num_steps: int, lr: float, warmup_steps: int, decay_share: float) -> float:
    """Linear warm-up, a plateau, and a linear fall to zero over the last share of the steps."""
    up = (step + 1) / (warmup_steps + 1)
    down = (num_steps - step) / (decay_share * num_steps) if decay_share else 1.0
    return lr * min(1.0, up, down)


def _save_state(trainer: SupervisedTrainer, path: Path, step: int) -> None:
    """Weights, optimiser state and step as one npz, put into place whole."""
    arrays = {name: value.cpu().numpy() for name, value in _tensors(trainer.state_dict())}
    part = path.with_suffix(".part.npz")
    np.savez(part, step=np.asarray(step), **arrays)
    part.replace(path)


def _load_state(trainer: SupervisedTrainer, path: Path) -> int:
    """Continue from `_save_state`; the step to do next."""
    state = trainer.state_dict()
    with np.load(path) as saved:
        for name, tensor in _tensors(state):
            tensor.copy_(tensor.new_tensor(saved[name]))
        step = int(saved["step"])
    state["count"] = step
    trainer.load_state_dict(state)
    return step


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor of a nested state, by path."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
        elif hasattr(value, "new_tensor"):
            yield prefix + name, value


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def _executor(processes: int) -> Iterator[Executor | None]:
    if processes == 1:
        yield None
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


_EXIT_PAUSED: Final = 75
"""sysexits' "try again"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build from a command line; exit status 75 means: call again to go on."""
    parser = argparse.ArgumentParser(prog="python -m nestling.families.build_bases")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=WEIGHTS_FOLDER)
    parser.add_argument("--only", nargs="+", default=[one.name for one in RECIPES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--max-rows", type=int)
    parser.add_argument("--deadline-s", type=float)
    parser.add_argument("--snapshot-items", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="budget factor, to try the machinery"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="recipe fields")
    given = parser.parse_args(arguments)
    changes = dict(pair.split("=", 1) for pair in given.set)
    recipes = []
    for name in given.only:
        one = recipe(name).scaled(given.scale) if given.scale != 1 else recipe(name)
        fields = {**one.model_dump(), **{key: json.loads(value) for key, value in changes.items()}}
        recipes.append(BaseRecipe.model_validate(fields))
    words = sys.argv[1:] if arguments is None else list(arguments)
    config = BuildConfig(
        out=given.out,
        work=given.work,
        device=given.device,
        processes=given.processes,
        stack=given.stack,
        max_rows=given.max_rows,
        deadline_s=given.deadline_s,
        snapshot_items=given.snapshot_items,
        command=" ".join(["python -m nestling.families.build_bases", *words]),
    )

    def log(entry: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(entry) + "\n")
        sys.stdout.flush()

    return 0 if build_all(config, recipes, log, SystemClock()) == "done" else _EXIT_PAUSED


if __name__ == "__main__":
    raise SystemExit(main())
