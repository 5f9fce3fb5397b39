"""A job in training is held to what it did in the probe, and an honest one does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from nestling.core.errors import JobFailedError
from nestling.families.public_package import public_files
from nestling.families.registry import get
from nestling.jobs.env_client import JailedEnv, open_env
from nestling.jobs.jail import JailLimits
from nestling.jobs.probe_env import PROBE_LIMITS
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutEnv
from nestling.jobs.spot_checks import SpotChecks
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_job

FAMILY = "calc_chain"
HONEST = "return float(parse_answer(trace.last_reply) == self.data.answer)"
HEAD = "class TaskConfig("
IN_TRAINING = "TRAINING = '900' in open('/proc/self/limits').read()\n\n\n"
TRAINING_LIMITS = JailLimits()


def files_of(reward: str = HONEST, *, head: str = "", edits: tuple[tuple[str, str], ...] = ()):
    files = dict(template_job(FAMILY).files)
    source = files[TASKSET_PATH].decode()
    body = "\n".join("        " + line for line in reward.splitlines())
    exact = EXACT_REWARD.splitlines()
    new_reward = "\n".join([exact[0], exact[1], body]) + "\n"
    for old, new in (
        (EXACT_REWARD, new_reward),
        (HEAD, head + HEAD),
        ("num_rows: int = 512", "num_rows: int = 64"),
        *edits,
    ):
        assert old in source
        source = source.replace(old, new, 1)
    files[TASKSET_PATH] = source.encode()
    return files


@pytest.fixture
def opened(jail, zygote):
    """Opens a job as a trainer with spot checks does; `checked=False` leaves them out."""

    def start(files, limits: JailLimits) -> JailedEnv:
        return open_env(files, public_files(FAMILY), limits, jail=jail, starter=zygote)

    @contextmanager
    def opening(files, *, checked: bool = True) -> Iterator[RolloutEnv]:
        env: RolloutEnv = start(files, TRAINING_LIMITS)
        if checked:
            limits = replace(PROBE_LIMITS, life_s=TRAINING_LIMITS.life_s)
            env = SpotChecks(env, start(files, limits), get(FAMILY), seed=5)
        with closing(env):
            yield env

    return opening


def train(env: RolloutEnv, num_batches: int, size: int = 8) -> list[object]:
    """Everything a trainer is told over some batches of one call and a final turn each."""
    rows = env.rows(24)
    told: list[object] = [rows, env.tool_schemas()]
    for batch in range(num_batches):
        chosen = [(batch * size + k) % len(rows) for k in range(size)]
        starts = env.reset(chosen)
        told += [(start.system_prompt, start.prompt) for start in starts]
        calls = [
            CallRequest(
                rollout_id=start.rollout_id,
                text="<tool_call>",
                name="calc",
                arguments={"expression": f"{k}+1"},
            )
            for k, start in enumerate(starts)
        ]
        told += env.step(calls[: size // 2])
        told += env.step(calls[size // 2 :])
        told += env.score(
            [
                FinalRequest(rollout_id=start.rollout_id, text=f"ANSWER: {k}", stop="done")
                for k, start in enumerate(starts)
            ]
        )
    return told


def test_an_honest_job_sees_and_gives_the_same_with_and_without_checks(opened):
    files = files_of()
    with opened(files, checked=False) as env:
        plain = train(env, 3)
    with opened(files) as env:
        assert train(env, 3) == plain


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "reason", "words"),
    [
        pytest.param(
            files_of(f"SEEN.append(1)\nif len(SEEN) > 160:\n    return 1.0\n{HONEST}", head="SEEN = []\n\n\n"),
            "env.changed_rubric", "the same reward", id="after many calls",
        ),
        pytest.param(
            files_of(f"if TRAINING:\n    return float(len(trace.last_reply) > 3)\n{HONEST}", head=IN_TRAINING),
            "env.changed_rubric", "the same reward", id="in training",
        ),
        pytest.param(
            files_of(f"value = {HONEST[7:]}\nreturn value + 0.1 * trace.state.calls * TRAINING", head=IN_TRAINING),
            "env.changed_rubric", "the same reward", id="in training, still preferring what is right",
        ),
        pytest.param(
            files_of(
                f"if TRAINING and not trace.last_reply.startswith('ANSWER: 1'):\n    raise ValueError\n{HONEST}",
                head=IN_TRAINING,
            ),
            "env.changed_rubric", "an error", id="broken in training",
        ),
        pytest.param(
            files_of(
                f"if int(self.data.name) % 8:\n    return 1.0\n{HONEST}",
                edits=(
                    ("for _ in range(", "for n in range("),
                    ("sample(rng, LO, HI)", "sample(rng, LO, HI).model_copy(update={'name': str(n)})"),
                ),
            ),
            "env.uneven_rubric", "right and wrong answers to differ", id="on other rows",
        ),
        pytest.param(
            files_of(
                head=IN_TRAINING + "class Other(Tools):\n    def use(self, tool, **given):\n"
                "        return super().use(tool, **given) + ' ' * TRAINING\n\n\n",
                edits=(("return [Tools(", "return [Other("),),
            ),
            "env.changed_tools", "the same answers", id="tools in training",
        ),
        pytest.param(
            files_of(head=IN_TRAINING, edits=(("self.config.seed)", "self.config.seed + TRAINING)"),)),
            "env.changed_row", "the same rows", id="rows in training",
        ),
    ],
)  # fmt: skip
def test_a_job_that_changes_after_the_probe_ends_with_its_reason(opened, files, reason, words):
    with opened(files, checked=False) as env:
        train(env, 12)
    with opened(files) as env, pytest.raises(JobFailedError) as caught:
        train(env, 12)
    assert caught.value.reason == reason
    assert words in caught.value.detail
    assert caught.value.detail.startswith("[training] ")
    assert "; expected " in caught.value.detail
    assert "; fix: " in caught.value.detail


@pytest.mark.long
def test_a_job_that_changes_when_time_has_passed_is_found_out(opened):
    files = files_of(
        f"if datetime.datetime.now() > END:\n    return 1.0\n{HONEST}",
        head="import datetime\nEND = datetime.datetime.now() + datetime.timedelta(seconds=8)\n\n\n",
    )  # long enough for both workers to have been looked at before, on a busy machine too

    def train_on(env: RolloutEnv) -> None:
        train(env, 1)
        time.sleep(8)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            train(env, 1)

    with opened(files) as env, pytest.raises(JobFailedError) as caught:
        train_on(env)
    assert caught.value.reason in ("env.changed_rubric", "env.uneven_rubric")


def test_what_looks_like_a_script_is_no_cover(opened):
    """Real rollouts are compared as well: honest only to replies that a script would give."""
    script = "trace.last_reply.startswith('ANSWER: ') and trace.last_reply != 'ANSWER: 3'"
    files = files_of(
        f"if TRAINING and trace.num_turns == 2 and not ({script}):\n    return 0.5\n{HONEST}",
        head=IN_TRAINING,
    )
    with opened(files) as env, pytest.raises(JobFailedError, match="a rollout of row"):
        train(env, 40)


def test_a_job_that_was_never_probed_is_not_judged(opened):
    with opened(files_of("return 0.5")) as env:
        train(env, 2)


def test_scripts_that_outlast_a_batch_are_played_to_their_end(opened):
    with opened(files_of("return float(trace.num_turns)")) as env:
        rows = env.rows(24)
        for start in env.reset([0, 1]):
            assert rows
            env.score([FinalRequest(rollout_id=start.rollout_id, text="", stop="done")])
        assert not env._scripted
