"""A training service over our engine with the calls and conventions of a Tinker service.

Losses are sums over tokens at temperature 1, saved weights have paths, nothing may be saved twice.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nestling.engine.model import Model, forward, logits
from nestling.engine.params import bind
from nestling.engine.turn_sampler import SamplingParams, TurnSampler
from nestling.engine.weights import Weights, split_views
from nestling.outer.learners.tinker_service import Answer
from nestling.outer.learners.tinker_service import Model as Offered


class NoSuchPathError(Exception):
    """As SDKs do it: the status is an attribute."""

    status_code = 404


class Now:
    """A call that is made when its result is asked for."""

    def __init__(self, service: EngineService, work: Callable[[], Any]) -> None:
        self._service, self._work = service, work
        self.cancelled = False

    def result(self, timeout_s: float) -> Any:
        self._service.timeouts.append(timeout_s)
        with self._service.lock:
            return self._work()

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Run:
    """One adapter that is trained: here, weights of its own."""

    flat: torch.Tensor
    optimizer: torch.optim.AdamW


@dataclass
class EngineService:
    model: Model
    paths: dict[str, Any] = field(default_factory=dict)
    timeouts: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    runs: int = 0

    def _run(self, flat: torch.Tensor) -> Run:
        self.runs += 1
        leaf = flat.clone().requires_grad_()
        return Run(leaf, torch.optim.AdamW([leaf], eps=1e-12, weight_decay=0.0))

    def models(self):
        return Now(self, lambda: [Offered(name="tiny", max_context=256, trainable=True)])

    def create(self, base_model, *, rank, seed):
        return Now(self, lambda: self._run(self.model.weights.flat))

    def resume(self, path):
        def work():
            flat, state = self._find(path)
            run = self._run(flat)
            if state is not None:
                run.optimizer.load_state_dict(copy.deepcopy(state))
            return run

        return Now(self, work)

    def sampler(self, *, base_model=None, path=None):
        flat = (lambda: self.model.weights.flat) if path is None else (lambda: self._find(path)[0])
        return Now(self, lambda: self._like(flat().clone()))

    def sample(self, client, ids, *, seed, max_tokens, stop_ids):
        self.seeds.append(seed)

        def work():
            sampler = TurnSampler(client, 1, 256)
            slot = sampler.open(list(ids), seed)
            params = SamplingParams(
                temperature=1.0, max_turn_tokens=max_tokens, max_total_tokens=256
            )
            turn = sampler.sample([slot], params)[0]
            return Answer(ids=turn.ids, logprobs=turn.logprobs, stopped=not turn.truncated)

        return Now(self, work)

    def logprobs(self, client, ids):
        def work():
            with torch.no_grad():
                return self._logprobs(client.weights.views(), ids).numpy()

        return Now(self, work)

    def forward_backward(self, run, data, loss, config):
        def work():
            found = []
            for one in data:
                now = self._logprobs(split_views(self.model.config, run.flat), one.ids)
                ratio = (now - torch.tensor(one.logprobs)).exp()
                gain = ratio * torch.tensor(one.advantages)
                if loss == "ppo":
                    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
                    bounded = ratio.clamp(low, high) * torch.tensor(one.advantages)
                    gain = torch.minimum(gain, bounded)
                (-gain.sum()).backward()
                found.append(now.detach().numpy())
            return found

        return Now(self, work)

    def optim_step(self, run, adam):
        def work():
            group = run.optimizer.param_groups[0]
            group["lr"], group["betas"] = adam.lr, (adam.beta1, adam.beta2)
            norm = float(run.flat.grad.norm())
            run.optimizer.step()
            run.optimizer.zero_grad()
            return {"engine/grad_norm": norm}

        return Now(self, work)

    def save_state(self, run, name, ttl_s):
        state = copy.deepcopy(run.optimizer.state_dict())
        return Now(self, lambda: self._keep(f"weights/{name}", run, state))

    def save_sampler(self, run, name, ttl_s):
        return Now(self, lambda: self._keep(f"sampler_weights/{name}", run, None))

    def delete(self, path):
        return Now(self, lambda: self.paths.pop(path) and None)

    def _keep(self, path, run, state):
        if path in self.paths:
            raise ValueError(f"{path} exists")
        self.paths[path] = (run.flat.detach().clone(), state)
        return path

    def _find(self, path):
        try:
            return self.paths[path]
        except KeyError:
            raise NoSuchPathError(path) from None

    def _like(self, flat):
        model = self.model
        return Model(
            config=model.config,
            weights=Weights(model.config, flat),
            tokenizer=model.tokenizer,
        )

    def _logprobs(self, views, ids):
        params = bind(self.model.config, views)
        hidden = forward(params, self.model.config, torch.tensor([[ids[:-1]]]))
        scores = logits(params, hidden.view(1, -1, hidden.shape[-1]))[0]
        rows = torch.log_softmax(scores.float(), -1)
        return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
