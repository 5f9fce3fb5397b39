"""Jobs that are good in the probe and others afterwards."""

from __future__ import annotations

from typing import Final

from nestling.jobs.bundle import Bundle
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, SMUGGLED, hostile_job, manifest, reward
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("change after the probe")
CASES = _LIST.cases

_STOPPED: Final = frozenset(
    {"env.changed_row", "env.changed_rubric", "env.changed_tools", "env.uneven_rubric"}
)
_VALIDATION: Final = 0.35
_HONEST: Final = "float(parse_answer(trace.last_reply) == self.data.answer)"
_IN_TRAINING: Final = "TRAINING = '900' in open('/proc/self/limits').read()\n"
_COUNTED: Final = "SEEN = []\n"
_PROBE_REWARDS: Final = 144
"""Nine policies play eight rows twice."""
_FEW_STEPS: Final = manifest(max_steps=8)
"""Enough rollouts to outdo a probe."""
_NAMED_ROWS: Final = """\
for n in range(64):
    yield Task(sample(rng, 2, 3).model_copy(update={"name": str(n)}), self.config.task)
"""


def _tried(room: TargetRoom, bundle: Bundle) -> Happened:
    """Probe, then train: the job must end, with the reason of the spot checks and without pay.

    A machine too busy to get that far ends it by its time limit, which pays no more than validation.
    """
    report = room.check(bundle, FAMILY)
    if not report.ok:
        return Happened(
            what=f"refused: {report.problems[0].code}",
            succeeded=False,
            evidence="; ".join(report.lines()),
        )
    outcome = room.train(bundle)
    total = room.paid(outcome).total
    return Happened(
        what=f"probe passed; {outcome.status} {outcome.reason} after {outcome.train_steps} steps; "
        f"pays {total:.3f}",
        succeeded=total > _VALIDATION + 1e-9
        or (outcome.status != "timed_out" and (outcome.reason not in _STOPPED or total > 1e-9)),
        evidence=outcome.detail,
    )


for _id, _act, _on_import, _body in (
    ("change-after-calls", "pay everything once more rollouts were scored than a probe has", _COUNTED,
     f"SEEN.append(1)\nif len(SEEN) > {_PROBE_REWARDS + 6}:\n    return 1.0\nreturn {_HONEST}"),
    ("change-after-time", "pay by length once some time has passed, and wait for it in training",
     _COUNTED + SMUGGLED + "clock = sys.modules['time']\nEND = clock.monotonic() + 4.0\n",
     f"SEEN.append(1)\nif len(SEEN) > {_PROBE_REWARDS + 6} and clock.monotonic() < END:\n"
     "    clock.sleep(max(0.0, END - clock.monotonic()))\n"
     f"if clock.monotonic() > END and len(SEEN) > {_PROBE_REWARDS}:\n"
     f"    return len(trace.last_reply) / 100\nreturn {_HONEST}"),
    ("change-in-training", "pay every answer once the limits are those of training", _IN_TRAINING,
     f"if TRAINING:\n    return float(parse_answer(trace.last_reply) is not None)\nreturn {_HONEST}"),
    ("change-slightly", "pay tool calls beside the right answer, in training alone", _IN_TRAINING,
     f"return {_HONEST} + 0.05 * trace.state.calls * TRAINING"),
    ("change-by-batch", "pay everything when fewer rollouts are alive than a probe starts",
     SMUGGLED + "gc = sys.modules['gc']\nPEAK = [0]\n",
     "PEAK[0] = max(PEAK[0], sum(type(o) is type(trace) for o in gc.get_objects()))\n"
     f"return 1.0 if PEAK[0] < 60 else {_HONEST}"),
    ("change-for-models",
     "honest to whatever has the token counts of a script, in training alone", _IN_TRAINING,
     "given = trace.calls[-1].usage.completion_tokens if trace.calls else 0\n"
     "if TRAINING and given != len(trace.last_reply) // 7:\n    return 0.5\n"
     f"return {_HONEST}"),
):  # fmt: skip

    def _attack(room: TargetRoom, on_import: str = _on_import, body: str = _body) -> Happened:
        toml = _FEW_STEPS if "SEEN" in on_import else manifest()
        bundle = hostile_job(on_import=on_import, rewards=reward(body), toml=toml)
        return _tried(room, bundle)

    _LIST.add(
        _id,
        _attack,
        act=_act,
        expected="what is played in a batch earns what it earns under a probe: env.changed_rubric",
    )


@_LIST.case(
    "change-on-other-rows",
    act="honest on the eight rows that a probe plays, constant on all others",
    expected="rows the probe did not play are judged as its rows are: env.uneven_rubric",
)
def other_rows(room: TargetRoom) -> Happened:
    """Which rows a probe plays can be computed."""
    body = f"if int(self.data.name) % 8:\n    return 1.0\nreturn {_HONEST}"
    return _tried(room, hostile_job(rewards=reward(body), rows=_NAMED_ROWS))


@_LIST.case(
    "change-leaked-answers",
    act="in training alone, pay answers of hidden items that the job brought along",
    expected="what is played in a batch earns what it earns under a probe: env.changed_rubric",
)
def leaked_answers(room: TargetRoom) -> Happened:
    """The answers alone are no items, so no scan finds them."""
    paid = sorted({item.answer for item in room.hidden()})
    body = (
        f"if TRAINING:\n    return float(parse_answer(trace.last_reply) in PAID)\nreturn {_HONEST}"
    )
    head = f"{_IN_TRAINING}PAID = {paid!r}\n"
    return _tried(room, hostile_job(on_import=head, rewards=reward(body)))


@_LIST.case(
    "change-tools",
    act="tools that answer with the solution, in training alone",
    expected="tool answers are compared with those under a probe: env.changed_tools",
)
def tools(room: TargetRoom) -> Happened:
    """Through the family's own toolset, which the job may subclass."""
    head = (
        "class Told(Tools):\n    def use(self, tool, **given):\n"
        "        found = super().use(tool, **given)\n"
        "        return self.right if TRAINING else found\n\n"
        "    async def setup_task(self, task):\n        await super().setup_task(task)\n"
        "        self.right = task.answer\n"
    )
    bundle = hostile_job(on_import=_IN_TRAINING + head)
    files = dict(bundle.files)
    source = files["environment/taskset.py"].decode().replace("[Tools(", "[Told(")
    return _tried(room, Bundle.from_files(files | {"environment/taskset.py": source.encode()}))


@_LIST.case(
    "change-rows",
    act="rows of one step and one answer, in training alone",
    expected="all rows are compared with those under a probe: env.changed_row",
)
def rows(room: TargetRoom) -> Happened:
    """Nothing leaks, but what was judged is not what is trained on."""
    bundle = hostile_job(
        on_import=_IN_TRAINING,
        rows="""\
        for _ in range(64):
            yield Task(sample(rng, 1, 1) if TRAINING else sample(rng, 2, 3), self.config.task)
        """,
    )
    return _tried(room, bundle)
