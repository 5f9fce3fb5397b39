"""The stack process's loop: connections in, work on the device, events out. One thread does all of it.

While the device computes, the loop reads sockets, so that tool answers are there when the next launch is made. A
connection that ends takes its job with it; nothing it sends can harm another's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, ModelError
from nestling.engine import stack_events
from nestling.engine.device import describe, free_bytes, set_precision, use
from nestling.engine.sampler import SamplingParams
from nestling.engine.stack import Stack, TrainRequest
from nestling.engine.stack_plan import StackShape
from nestling.engine.stack_play import Play
from nestling.engine.stack_train import PlayedRows
from nestling.inner import stack_wire as wire
from nestling.inner.stack_config import StackConfig
from nestling.inner.stack_settings import LearnSettings

__all__ = ["StackServer"]

_log = logging.getLogger(__name__)
_READ_BYTES: Final = 2**20
_POLL_S: Final = 0.0005
"""Between two looks at a working device."""


class StackServer:
    """All stacks of one process, behind a unix socket."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        bases: Mapping[str, Path],
        device: str,
        config: StackConfig,
        clock: Clock,
    ) -> None:
        use(device)
        set_precision(config.precision)
        self._bases, self._device, self._config, self._clock = dict(bases), device, config, clock
        whole = int(config.memory_gib * 2**30) or free_bytes(device)
        self._budget = whole // config.processes
        self._stacks: dict[str, Stack] = {}
        self._clients: dict[int, _Client] = {}  # by job
        self._next_job = 0
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self, stop: socket.socket | int) -> None:
        """Serve until `stop` (a pipe or socket) becomes readable or ends."""
        self._selector.register(stop, selectors.EVENT_READ, stop)
        while not self._is_over:
            self.turn(None)

    def turn(self, wait_s: float | None) -> None:
        """One round; waits for a message up to `wait_s` (None: for ever) when there is nothing to do."""
        busy = any(not stack.is_idle for stack in self._stacks.values())
        self._poll(0 if busy else wait_s)
        for stack in tuple(self._stacks.values()):
            if not stack.is_idle:
                for event in stack.advance(lambda: self._poll(_POLL_S)):
                    self._tell(stack, event)

    def close(self) -> None:
        """End every connection."""
        for client in tuple(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()

    # --- connections --------------------------------------------------------------------------

    def _poll(self, wait_s: float | None) -> None:
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
            elif not isinstance(key.data, _Client):
                self._is_over = True
            else:
                self._serve(key.data, events)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection, self._next_job)
            self._next_job += 1
            self._clients[client.job] = client
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and not client.read():
                self._drop(client)
                return
            for message in wire.frames(client.received):
                if client.job not in self._clients:
                    return  # it broke off while it was answered; what it joined now nobody would end
                self._handle(client, message)
        except (wire.WireError, OSError) as error:
            _log.warning("job %d: %s", client.job, error)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.job, None) is None:
            return
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.stack is not None:
            client.stack.leave(client.job)

    def _send(self, client: _Client, message: wire.FromStack) -> None:
        client.unsent += wire.encode(message)
        try:
            self._flush(client)
        except OSError as error:
            _log.warning("job %d: %s", client.job, error)
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        client.write()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.connection, wanted, client)

    # --- requests -----------------------------------------------------------------------------

    def _handle(self, client: _Client, message: wire.ToStack | wire.FromStack) -> None:
        if isinstance(message, wire.AskRoom | wire.Join | wire.JoinWeights):
            try:
                self._admit(client, message)
            except (ConfigError, ModelError, ValidationError) as error:
                self._send(client, wire.Failed(reason="stack.config", detail=str(error)))
            return
        stack, job = client.stack, client.job
        if stack is None:
            raise wire.WireError("a request before the job has joined")
        if isinstance(message, wire.Play):
            stack.play(job, _play(message))
        elif isinstance(message, wire.Answer):
            rollouts, lengths = wire.ints(message.rollouts), wire.ints(message.lengths)
            stack.answer(job, rollouts, lengths, wire.ints(message.ids))
        elif isinstance(message, wire.Train):
            request = TrainRequest(
                advantages=wire.floats(message.advantages),
                learn_observations=message.learn_observations,
                temperature=message.temperature,
                lr=message.lr,
            )
            stack.train(job, request)
        elif isinstance(message, wire.Supervise):
            stack.supervise(job, *_worked(message), lr=message.lr)
        elif isinstance(message, wire.Save):
            stack.save(job, Path(message.folder))
        else:
            raise wire.WireError(f"{type(message).__name__} is not for this end")

    def _admit(self, client: _Client, message: wire.AskRoom | wire.Join | wire.JoinWeights) -> None:
        fingerprint = self._fingerprint()
        if isinstance(message, wire.AskRoom) and not message.base:
            self._send(client, _room(client, None, fingerprint))
            return
        stack = self._stack(message.base)
        if isinstance(message, wire.AskRoom):
            self._send(client, _room(client, stack, fingerprint))
            return
        if client.stack is not None:
            raise wire.WireError("the job has joined already")
        client.stack = stack
        if isinstance(message, wire.Join):
            settings = LearnSettings.model_validate_json(message.settings)
            stack.join(client.job, settings.for_engine())
        else:
            stack.join_weights(client.job, wire.floats(message.weights))

    def _stack(self, base: str) -> Stack:
        """The stack of a base model, made when it is first asked for."""
        if base in self._stacks:
            return self._stacks[base]
        if base not in self._bases:
            raise ConfigError(f"no base model {base!r}; expected one of {sorted(self._bases)}")
        budget = self._budget - sum(stack.reserved for stack in self._stacks.values())
        made = Stack(
            self._bases[base],
            StackShape.for_base(
                self._bases[base],
                num_lanes=self._config.max_jobs,
                num_rows=self._config.rows_per_job,
                max_len=self._config.max_len,
                precision=self._config.precision,
                tile_tokens=self._config.tile_tokens,
                budget=budget,
            ),
            device=self._device,
            budget=budget,
            clock=self._clock,
        )
        _log.info("%s on %s: %d jobs at a time", base, self._device, made.num_lanes)
        self._stacks[base] = made
        return made

    def _fingerprint(self) -> str:
        sizes = self._config.model_dump_json(
            exclude={"devices", "processes", "memory_gib", "max_jobs"}
        )
        return f"{describe(self._device)} {sizes}"

    # --- events -------------------------------------------------------------------------------

    def _tell(self, stack: Stack, event: stack_events.Event) -> None:
        client = self._clients.get(event.job)
        if client is not None:
            self._send(client, _message(event, stack.busy_s(event.job)))


class _Client:
    """One connection and its job."""

    def __init__(self, connection: socket.socket, job: int) -> None:
        self.connection, self.job = connection, job
        self.stack: Stack | None = None
        self.received, self.unsent = bytearray(), bytearray()

    def read(self) -> bool:
        """Take what has come; False at the end of the connection."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        self.received += data
        return bool(data)

    def write(self) -> None:
        """Send as much as the connection takes."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self.connection.send(self.unsent)
                del self.unsent[:sent]


def _room(client: _Client, stack: Stack | None, fingerprint: str) -> wire.Room:
    return wire.Room(
        num_jobs=stack.num_jobs if stack else 0,
        num_lanes=stack.num_lanes if stack else 0,
        asker=client.job,
        process_id=os.getpid(),
        fingerprint=fingerprint,
    )


def _play(message: wire.Play) -> Play:
    lengths = wire.ints(message.lengths)
    ids, ends = wire.ints(message.prompts), np.cumsum(lengths)
    if len(lengths) and (int(lengths.min()) < 0 or int(ends[-1]) != len(ids)):
        raise wire.WireError(f"{len(ids)} prompt tokens for lengths that sum to {ends[-1]}")
    uniforms = wire.floats(message.uniforms)
    if len(lengths) == 0 or len(uniforms) != len(lengths) * (message.max_total_tokens + 1):
        raise wire.WireError(f"{len(uniforms)} random numbers for {len(lengths)} prompts")
    try:
        params = SamplingParams(
            temperature=message.temperature,
            max_turn_tokens=message.max_turn_tokens,
            max_total_tokens=message.max_total_tokens,
            max_turns=message.max_turns,
        )
    except ConfigError as error:
        raise wire.WireError(str(error)) from error
    return Play(
        prompts=np.split(ids, ends[:-1]), uniforms=uniforms.reshape(len(lengths), -1), params=params
    )


def _worked(message: wire.Supervise) -> tuple[PlayedRows, npt.NDArray[np.float32]]:
    """Rows and cross-entropy weights [N, width]."""
    lengths = wire.ints(message.lengths)
    shape = (len(lengths), message.width)
    ids, weights = wire.ints(message.ids), wire.floats(message.ce_weights)
    if len(lengths) == 0 or not ids.size == weights.size == shape[0] * shape[1]:
        raise wire.WireError(f"{ids.size} ids and {weights.size} weights; expected {shape}")
    if int(lengths.min()) < 1 or int(lengths.max()) > message.width:
        raise wire.WireError(f"lengths beyond the width {message.width}")
    rows = PlayedRows(
        ids=ids.reshape(shape),
        sampled=np.zeros(shape, bool),
        logprobs=np.zeros(shape, np.float32),
        lengths=lengths,
    )
    return rows, weights.reshape(shape)


def _message(event: stack_events.Event, busy_s: float) -> wire.FromStack:
    if isinstance(event, stack_events.TurnsEnded):
        turns = event.turns
        return wire.TurnsEnded(
            rollouts=wire.pack_ints(turns.rows),
            lengths=wire.pack_ints(turns.lengths),
            ids=wire.pack_ints(turns.ids),
            truncated=turns.truncated.tobytes(),
        )
    if isinstance(event, stack_events.Finished):
        played = event.played
        return wire.Finished(
            width=played.ids.shape[1],
            ids=wire.pack_ints(played.ids),
            sampled=np.ascontiguousarray(played.sampled).tobytes(),
            logprobs=wire.pack_floats(played.logprobs),
            lengths=wire.pack_ints(played.lengths),
            prompt_lengths=wire.pack_ints(played.prompt_lengths),
            turns=wire.pack_ints(played.turns),
            stops=wire.pack_ints(played.stops),
            busy_s=busy_s,
        )
    if isinstance(event, stack_events.Trained):
        return wire.Trained(loss=event.loss, step=event.step, busy_s=busy_s)
    if isinstance(event, stack_events.Saved):
        return wire.Saved(
            base_hash=event.base_hash,
            final_hash=event.final_hash,
            delta_norm=event.delta_norm,
            is_finite=event.is_finite,
            busy_s=busy_s,
        )
    if isinstance(event, stack_events.Failed):
        return wire.Failed(reason=event.reason, detail=event.detail)
    return wire.Joined()
