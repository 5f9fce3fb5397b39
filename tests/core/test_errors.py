"""Errors cross process borders whole: pools and pipes pickle them."""

from __future__ import annotations

import pickle

import pytest

from nestling.core.errors import JailError, JobFailedError, JobRejectedError, NestlingError, Problem

_PROBLEM = Problem(stage="schema", code="schema.x", wrong="a", expected="b", fix="c")


@pytest.mark.parametrize(
    "error",
    [
        JobFailedError("stack.died", "it ended"),
        JailError("env.hung", "no answer"),
        JobRejectedError([_PROBLEM]),
    ],
)
def test_pickled_and_back(error: NestlingError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
