"""Manifests that ask for what they may not have."""

from __future__ import annotations

from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("job settings")
CASES = _LIST.cases

_HEAD = 'base_model = "nano"\n[prime_rl]\nlr = 1e-4\n'


def _refused(room: TargetRoom, toml: str) -> Happened:
    report = room.check(hostile_job(toml=toml), FAMILY)
    stages = {problem.stage for problem in report.problems}
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok or not stages <= {"schema", "budget", "load"},
        evidence="; ".join(report.lines()),
    )


for _id, _act, _toml in (
    ("set-steps", "a thousand million steps", _HEAD + "max_steps = 1000000000\n"),
    ("set-batch", "a batch of a million", _HEAD + "batch_size = 1000000\n"),
    ("set-budget", "steps and batch each at their limit", _HEAD + "max_steps = 16\nbatch_size = 256\n"),
    ("set-negative", "negative steps", _HEAD + "max_steps = -1\n"),
    ("set-huge-number", "a number of four thousand digits", _HEAD + f"max_steps = {'9' * 4000}\n"),
    ("set-infinite-lr", "an infinite learning rate", 'base_model = "nano"\n[prime_rl]\nlr = inf\n'),
    ("set-nan-lr", "a learning rate that is not a number",
     'base_model = "nano"\n[prime_rl]\nlr = nan\n'),
    ("set-text-number", "a number as text", _HEAD + 'max_steps = "2"\n'),
    ("set-bool-number", "true in place of a number", _HEAD + "max_steps = true\n"),
    ("set-float-steps", "2.0 steps", _HEAD + "max_steps = 2.0\n"),
    ("set-list", "a list in place of a number", _HEAD + "max_steps = [1]\n"),
    ("set-output-dir", "another output folder", _HEAD + 'output_dir = "/etc"\n'),
    ("set-launch-command", "a launch command and hooks", _HEAD + 'command = "sh -c id"\nhooks = ["x"]\n'),
    ("set-environment", "environment variables", _HEAD + '[env_vars]\nLD_PRELOAD = "/tmp/x.so"\n'),
    ("set-deep-key", "a dotted path into the trainer's own config",
     _HEAD + 'trainer.model.name = "micro"\n'),
    ("set-base-path", "a base model by path", 'base_model = "../../models/forged"\n[prime_rl]\nlr = 1e-4\n'),
    ("set-base-url", "a base model from a hub", 'base_model = "org/model"\n[prime_rl]\nlr = 1e-4\n'),
    ("set-env-id", "an environment other than its own", _HEAD + '[env]\nid = "other"\n'),
    ("set-env-nested", "nested environment values", _HEAD + "[env.task]\nx = {a = 1}\n"),
    ("set-env-unknown", "an environment value that its config lacks", _HEAD + "[env]\nnothing = 1\n"),
    ("set-twice", "a table twice", _HEAD + "[prime_rl]\nlr = 1e-3\n"),
    ("set-nested-bomb", "a hundred thousand nested lists", _HEAD + "max_steps = " + "[" * 14_000 + "\n"),
    ("set-upper-case", "a key in capitals", _HEAD + "MAX_STEPS = 2\n"),
    ("set-seed", "its own seed", _HEAD + "seed = 1\n"),
    ("set-not-text", "bytes that are not UTF-8 text", _HEAD + "# \ud7ff\x01\n"),
):  # fmt: skip

    def _attack(room: TargetRoom, toml: str = _toml) -> Happened:
        return _refused(room, toml)

    _LIST.add(
        _id,
        _attack,
        act=f"job.toml with {_act}",
        expected="a closed table of keys with types and bounds: refused with its fix",
    )
