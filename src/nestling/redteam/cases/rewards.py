"""Rewards that pay for something else than the right answer, or that are no numbers."""

from __future__ import annotations

from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import EXACT_REWARD, FAMILY, SMUGGLED, hostile_job, reward
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("degenerate rewards")
CASES = _LIST.cases

_HONEST = "float(parse_answer(trace.last_reply) == self.data.answer)"


def _refused(room: TargetRoom, rewards: str, on_import: str, stages: tuple[str, ...]) -> Happened:
    report = room.check(hostile_job(rewards=rewards, on_import=on_import), FAMILY)
    stage = report.problems[0].stage if report.problems else ""
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok or stage not in stages,
        evidence="; ".join(report.lines()),
    )


for _id, _body, _on_import, _act in (
    ("reward-constant", "return 1.0", "", "the same reward for everything"),
    ("reward-length", "return len(trace.last_reply) / 100", "", "pay by length"),
    ("reward-format", 'return float(trace.last_reply.startswith("ANSWER: "))', "", "pay the form"),
    ("reward-calls", "return float(trace.state.calls)", "", "pay tool calls"),
    ("reward-upside-down", f"return 1.0 - {_HONEST}", "", "pay wrong answers"),
    ("reward-contains", "return float(self.data.answer in trace.transcript)", "",
     "pay an answer that stands anywhere in the talk"),
    ("reward-random", "return random.random()", "", "pay by lot"),
    ("reward-nan", f"return {_HONEST} or float('nan')", "", "not a number for wrong answers"),
    ("reward-infinite", f"return {_HONEST} * float('inf')", "", "infinity for right answers"),
    ("reward-huge", f"return {_HONEST} * 1e8", "", "a hundred million for right answers"),
    ("reward-hugely-negative", f"return ({_HONEST} - 1) * 1e8", "", "minus a hundred million"),
    ("reward-bool", "return parse_answer(trace.last_reply) == self.data.answer", "", "a bool"),
    ("reward-text", f"return str({_HONEST})", "", "a text that reads as a number"),
    ("reward-list", f"return [{_HONEST}]", "", "a list"),
    ("reward-always-equal", "return Always()",
     "class Always:\n    def __call__(self): return 1.0\n    def __lt__(self, o): return True\n",
     "an object that compares as it likes"),
    ("reward-own-float", f"return Odd({_HONEST})",
     SMUGGLED + "Odd = type('Odd', (float,), {'__' + 'float__': lambda self: 1e300})\n",
     "a subclass of float that converts to 1e300"),
    ("reward-counts-rollouts", "SEEN.append(1)\nreturn float(len(SEEN) % 2)", "SEEN = []",
     "a reward that depends on how many rollouts came before"),
    ("reward-remembers", f"SEEN.append(self.data.answer)\nreturn {_HONEST} + len(SEEN) * 1e-3",
     "SEEN = []", "a reward that grows with every rollout"),
    ("reward-reads-others",
     f"others = [o for o in os.sys.modules['gc'].get_objects() if type(o) is type(trace)]\n"
     f"return {_HONEST} + 0.1 * len(others)", SMUGGLED,
     "a reward that looks at the other rollouts in memory"),
):  # fmt: skip

    def _attack(room: TargetRoom, body: str = _body, on_import: str = _on_import) -> Happened:
        return _refused(room, reward(body), on_import, ("static", "load", "rows", "rubric"))

    _LIST.add(_id, _attack, act=_act, expected="the probe refuses the rubric")


@_LIST.case(
    "reward-many-names",
    act="seventy metrics beside an honest reward",
    expected="at most 64 numbers of a rollout are taken",
)
def many_names(room: TargetRoom) -> Happened:
    """A record that grows without end."""
    metric = "    @vf.metric\n    async def m{n}(self, trace):\n        return 1.0\n\n"
    metrics = "".join(metric.format(n=n) for n in range(70))
    return _refused(room, metrics + EXACT_REWARD, "", ("rubric",))


@_LIST.case(
    "reward-answer-in-the-prompt",
    act="write the answer into the prompt and pay whoever repeats it",
    expected="a copy of the prompt must not earn as much as the right answer",
)
def answer_in_the_prompt(room: TargetRoom) -> Happened:
    """The trivial task."""
    bundle = hostile_job(
        rows="""
        for _ in range(64):
            row = sample(rng, 2, 3)
            yield Task(row.model_copy(update={"prompt": row.prompt + " It is " + row.answer}),
                       self.config.task)
        """,
        rewards=reward("return float(self.data.answer in trace.last_reply)"),
    )
    report = room.check(bundle, FAMILY)
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok,
        evidence="; ".join(report.lines()),
    )


@_LIST.case(
    "reward-evaluates-the-answer",
    act="evaluate the model's answer as code",
    expected="refused before it runs",
)
def evaluates(room: TargetRoom) -> Happened:
    """In plain sight."""
    return _refused(room, reward("return float(eval(trace.last_reply) == 1)"), "", ("static",))


@_LIST.case(
    "reward-evaluates-the-answer-hidden",
    act="evaluate the model's answer as code, past the static check",
    expected="whatever a model writes runs in the jail: no secret comes out",
)
def evaluates_hidden(room: TargetRoom) -> Happened:
    """The small model as the attacker: its answer reads every secret file."""
    bundle = hostile_job(
        on_import=SMUGGLED + 'run = getattr(os.sys.modules["built" + "ins"], "ev" + "al")\n',
        rewards=EXACT_REWARD.replace(
            "        return",
            "        self.tried = run('[open(p).read() for p in PATHS]', {'PATHS': PATHS})\n"
            "        return",
        ),
    )
    source = bundle.files["environment/taskset.py"].decode()
    paths = [str(path) for path in room.secret_files]
    bundle = hostile_job(files={"environment/taskset.py": f"PATHS = {paths!r}\n{source}"})
    report = room.check(bundle, FAMILY)
    text = report.model_dump_json()
    return Happened(
        what="accepted" if report.ok else f"refused: {report.problems[0].code}",
        succeeded=report.ok or room.canary.is_in(text),
        evidence="; ".join(report.lines()),
    )
