"""Laws that hold for any input, found by hypothesis rather than by damage."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestling.agent.workspace import Workspace, WorkspaceError
from nestling.core.errors import JobRejectedError
from nestling.engine.chat import FinalAnswer, MalformedCall, ToolCall, parse_turn, render_call
from nestling.jobs import env_protocol as wire
from nestling.jobs.manifest import parse_manifest, render_manifest

pytestmark = pytest.mark.long

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)  # fmt: skip
MARKS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "<|im_start|>",
        '{"name": "x", "arguments": {}}',
        "\n",
    ]
)
PART = st.text(st.sampled_from(string.ascii_letters + "._-/~\\\0\n\u202e é"), max_size=12)
FEW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(st.lists(MARKS | st.text(max_size=10), max_size=8))
def test_any_text_is_one_call_or_none(pieces):
    text = "".join(pieces)
    turn = parse_turn(text)
    assert isinstance(turn, FinalAnswer | MalformedCall | ToolCall)
    if isinstance(turn, ToolCall):
        assert text.count("<tool_call>") == 1
        assert text.rstrip().endswith("</tool_call>")
    if isinstance(turn, FinalAnswer):
        assert "<tool_call>" not in text


@FEW
@given(st.text(min_size=1, max_size=20), st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_a_rendered_call_is_read_back_or_refused(name, arguments):
    try:
        text = render_call(name, arguments)
        text.encode()
    except UnicodeEncodeError:
        return
    turn = parse_turn(text)
    if isinstance(turn, ToolCall):
        assert turn.name == name
        assert json.dumps(turn.arguments) == json.dumps(arguments)
    else:
        assert isinstance(turn, MalformedCall)


@FEW
@given(JSON)
def test_any_json_is_a_reply_or_refused(value):
    try:
        data = json.dumps(value).encode()
    except UnicodeEncodeError:
        return
    for decode in (wire.decode_reply, wire.decode_request):
        with pytest.raises(wire.ProtocolError):
            decode(data)


@FEW
@given(path=st.lists(PART, max_size=5).map("/".join), content=st.text(max_size=50))
def test_a_path_never_leaves_the_workspace(tmp_path, path, content):
    root = tmp_path / "parent" / "workspace"
    if not root.exists():
        Workspace.create(root, {"TASK.md": "task"})
    workspace = Workspace(root)
    try:
        workspace.write(path, content)
    except WorkspaceError:
        pass
    else:
        assert workspace.read(path) == content
        assert path.lstrip("./").split("/")[0] in ("job.toml", "environment", "data")
    assert [entry.name for entry in root.parent.iterdir()] == ["workspace"]
    assert (root / "TASK.md").read_text() == "task"
    assert not any(entry.is_symlink() for entry in root.rglob("*"))


@FEW
@given(st.dictionaries(st.sampled_from(["lr", "max_steps", "batch_size", "seed", "algo"]), LEAF))
def test_a_manifest_that_is_taken_is_within_bounds(values):
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    text = 'base_model = "nano"\n[prime_rl]\n' + "\n".join(lines)
    try:
        manifest = parse_manifest(text)
    except JobRejectedError:
        return
    table = manifest.prime_rl
    assert 1e-5 <= table.lr <= 3e-3
    assert table.max_steps * table.batch_size <= 1024
    assert parse_manifest(render_manifest(manifest)) == manifest
