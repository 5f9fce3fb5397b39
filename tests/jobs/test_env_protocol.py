"""Frames: what is honest passes, everything else is refused before it is used."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.jobs import env_protocol as wire


def body(document: object) -> bytes:
    return json.dumps(document).encode()


SCORE = {"reward": 1.0, "rewards": {"a": 1.0}, "metrics": {}, "error": None}


def score(**changes: object) -> bytes:
    return body({"type": "score_reply", "records": [{**SCORE, **changes}]})


def test_a_message_survives_its_frame():
    call = wire.CallFrame(
        rollout_id=3,
        text="é<tool_call>",
        name="open",
        arguments={"a": [1, 2.5, None, True, {"b": "c"}]},
        malformed=None,
        prompt_tokens=4,
        completion_tokens=5,
    )
    frame = wire.encode(wire.Step(calls=[call]))
    assert wire.frame_length(frame[:4]) == len(frame) - 4
    assert wire.decode_request(frame[4:]) == wire.Step(calls=[call])


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": True},
        {"reward": "1.0"},
        {"reward": None},
        {"reward": [1.0]},
        {"reward": 1e12},
        {"rewards": {"a": True}},
        {"rewards": {"a": -1e10}},
        {"rewards": {str(k): 1.0 for k in range(100)}},
        {"rewards": {"x" * 300: 1.0}},
        {"rewards": [1.0]},
        {"metrics": {"m": "high"}},
        {"error": 3},
        {"error": "x" * 5000},
        {"extra": 1},
    ],
)
def test_a_score_of_the_wrong_shape_is_refused(changes):
    assert wire.decode_reply(score())
    with pytest.raises(wire.ProtocolError):
        wire.decode_reply(score(**changes))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"type":"nothing"}',
        b'{"type":"load","env_args":{}}',
        score().replace(b"1.0", b"NaN"),
        score().replace(b"1.0", b"Infinity"),
        score().replace(b"1.0", b"1e999"),
        b'{"type":"closed","type2":1}',
        b'{"type":"step_reply","answers":["\\ud800"]}',
        b'{"type":"step_reply","answers":["' + b"x" * 20000 + b'"]}',
        b'{"type":"step_reply","answers":[' + b"null," * 5000 + b"null]}",
        b'{"type":"tools_reply","schemas":[' + b"[" * 2000 + b"]" * 2000 + b"]}",
        b'{"type":"tools_reply","schemas":[{"a":' + b"[" * 100 + b"]" * 100 + b"}]}",
        b'{"type":"tools_reply","schemas":[{"a":' + b"[" * 100000 + b"]" * 100000 + b"}]}",
        b'{"type":"tools_reply","schemas":[{"a":[' + b"0," * 20000 + b"0]}]}",
        b'{"type":"tools_reply","schemas":[{"a":' + b"9" * 400 + b"}]}",
        b'{"type":"tools_reply","schemas":[{}]}',
        b'{"type":"tools_reply","schemas":[{"function":"x"}]}',
        b'{"type":"tools_reply","schemas":[{"function":{"name":1}}]}',
        b'{"type":"tools_reply","schemas":[{"function":{"name":"x","parameters":[]}}]}',
        b'{"type":"tools_reply","schemas":[{"function":{"name":"x","parameters":{"properties":[]}}}]}',
        b'{"type":"tools_reply","schemas":[{"function":{"name":"x","parameters":{"properties":{"a":1}}}}]}',
        b'{"type":"fault","code":"Not A Code!","detail":"x"}',
        b'{"type":"rows_reply","rows":[],"more":1}',
        b'{"type":"started","starts":[{"rollout_id":-1,"system_prompt":"","prompt":""}]}',
        b'{"type":"started","starts":[{"rollout_id":1.5,"system_prompt":"","prompt":""}]}',
        b'{"type":"started","starts":[{"rollout_id":true,"system_prompt":"","prompt":""}]}',
    ],
)
def test_no_honest_worker_sends_this(raw):
    with pytest.raises(wire.ProtocolError):
        wire.decode_reply(raw)


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\x80\0\1"])
def test_frame_lengths_are_bounded(header):
    with pytest.raises(wire.ProtocolError):
        wire.frame_length(header)


def test_a_message_that_does_not_fit_is_not_sent():
    with pytest.raises(wire.ProtocolError, match="at most"):
        wire.encode(wire.StepReply(answers=["x" * (9 << 20)]))
    with pytest.raises(wire.ProtocolError, match="cannot encode"):
        wire.encode(wire.StepReply(answers=["\ud800"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**70, {1: 2}, b"x", {"a": {1}}])
def test_odd_values_are_refused_on_the_way_out_too(value):
    with pytest.raises(wire.ProtocolError):
        wire.check_json([value])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_reply_or_an_error(raw):
    for decode in (wire.decode_reply, wire.decode_request):
        try:
            decode(raw)
        except wire.ProtocolError:
            continue


def test_a_damaged_honest_frame_is_a_reply_or_an_error():
    rng = random.Random(0)
    honest = score() + b" "
    for _ in range(2000):
        damaged = bytearray(honest)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            wire.decode_reply(bytes(damaged))
        except wire.ProtocolError:
            continue
