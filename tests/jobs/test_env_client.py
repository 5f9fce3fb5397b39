"""Real jailed workers: an honest job end to end, and every way a hostile one can fail."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import nestling
from nestling.core.errors import ConfigError, JailError
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits
from nestling.jobs.jail_runtime import python_runtime
from nestling.jobs.rollout_env import CallRequest, FinalRequest


@pytest.fixture
def start(jail, zygote, limits, ledger_tools):
    """Open a job's environment warm; closed at the end of the test."""
    envs = []

    def started(job: Any, *, limits: JailLimits = limits, cold: bool = False, **env_args: Any):
        env = open_env(
            job,
            ledger_tools,
            limits,
            jail=jail,
            starter=None if cold else zygote,
            env_args=env_args,
        )
        envs.append(env)
        return env

    yield started
    for env in envs:
        env.close()
        env.close()


@pytest.fixture
def start_with(start, make_job, ledger_taskset_source):
    """The usual job with code put into its reward, its tools' module or its import."""

    def started(*, reward: str = "", on_import: str = "", **more: Any):
        source = ledger_taskset_source
        body = "    async def correct(self, trace) -> float:\n"
        assert body in source
        indented = "".join(f"        {line}\n" for line in reward.splitlines())
        source = source.replace(body, body + indented)
        return start(make_job(on_import + "\n" + source), **more)

    return started


def play(env: Any, row: int = 0, text: str | None = None) -> Any:
    (begun,) = env.reset([row])
    return env.score([FinalRequest(rollout_id=begun.rollout_id, text=text or "x", stop="done")])[0]


def namespace_of(env: Any) -> int:
    return Path(f"/proc/{env._process.init_pid}/ns/pid").stat().st_ino


def members(namespace: int) -> set[int]:
    """Every process in a jail, wherever it hides."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/ns/pid").stat().st_ino == namespace:
                found.add(pid)
    return found


def emptied(namespace: int) -> bool:
    """Whether the kernel, which ends killed processes in its own time, has ended them all."""
    deadline = time.monotonic() + 30
    while members(namespace) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(namespace)


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_works_end_to_end(start, make_job, cold):
    env = start(make_job(), cold=cold, num_tasks=30)
    rows = env.rows(1000)
    assert [row.index for row in rows] == list(range(30))
    answers = [json.loads(row.data_json)["answer"] for row in rows]
    names = [schema["function"]["name"] for schema in env.tool_schemas()]
    assert names == ["balance", "deposit"]
    starts = env.reset([0, 1, 1])
    assert [s.prompt for s in starts] == [rows[0].prompt, rows[1].prompt, rows[1].prompt]
    more = [int(s.prompt.split()[1]) for s in starts]
    calls = [
        CallRequest(
            rollout_id=s.rollout_id,
            text="<tool_call>",
            name="deposit",
            arguments={"account": "ann", "amount": amount},
        )
        for s, amount in zip(starts, more, strict=True)
    ]
    assert env.step(calls[:2]) == [str(answers[0]), str(answers[1])]
    finals = [
        FinalRequest(rollout_id=starts[0].rollout_id, text=f"ANSWER: {answers[0]}", stop="done"),
        FinalRequest(rollout_id=starts[1].rollout_id, text="ANSWER: 0", stop="done"),
        FinalRequest(rollout_id=starts[2].rollout_id, text="", stop="max_turns"),
    ]
    records = env.score(finals)
    assert [record.reward for record in records] == pytest.approx([1.0, 0.2, 0.0])
    assert records[0].metrics["turns"] == 2
    assert records[2].metrics["truncated"] == 1
    assert all(record.error is None for record in records)


@pytest.mark.long
def test_batches_larger_than_a_frame_are_split(start, make_job):
    env = start(make_job())
    starts = env.reset([k % 40 for k in range(600)])
    assert len({s.rollout_id for s in starts}) == 600
    finals = [FinalRequest(rollout_id=s.rollout_id, text="x", stop="done") for s in starts]
    assert len(env.score(finals)) == 600


def test_a_warm_worker_starts_fast(start, make_job):
    start(make_job()).close()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        env = start(make_job())
        seconds.append(time.perf_counter() - began)
        env.close()
    print(f"open_env, warm: {min(seconds) * 1e3:.0f} ms")
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    ("on_import", "code", "said"),
    [
        ("import nothing_like_this", "env.import", "nothing_like_this"),
        ("1 / 0", "env.import", "taskset.py:1"),
        ("raise SystemExit(0)", "env.exited", "SystemExit"),
        ("import os; os._exit(0)", "env.exited", "ended without an answer"),
        ("import os; os.kill(os.getpid(), 9)", "env.exited", "ended"),
        ("x = bytearray(3 << 30)", "env.", ""),
    ],
)
def test_a_package_that_fails_on_import(start_with, on_import, code, said):
    with pytest.raises(JailError) as caught:
        start_with(on_import=on_import)
    assert caught.value.reason.startswith(code)
    assert said in caught.value.detail


def test_unknown_env_values_are_refused(start, make_job):
    with pytest.raises(JailError, match=r"env\.config: .*num_task"):
        start(make_job(), num_task=3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("reward", "code"),
    [
        ("while True: pass", "env.deadline"),
        ("import time; time.sleep(60)", "env.deadline"),
        ("import os; os._exit(0)", "env.exited"),
        ("import sys; sys.exit(0)", "env.exited"),
        ("print('x' * (1 << 20) * 64)", "env.output_flood"),
        ("import os\nwhile True: os.write(1, b'y' * 65536)", "env.output_flood"),
        (
            "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'junk' * 4)\n  except OSError: pass",
            "env.protocol",
        ),
        ("import os\nos.write(4, (9 << 20).to_bytes(4, 'big') + b'x')", "env.protocol"),
        ("import os\nos.write(4, (2).to_bytes(4, 'big') + b'{}')", "env.protocol"),
        ("import os\nos.close(4)", "env."),
    ],
)
def test_a_reward_that_attacks_the_worker_is_a_fault_with_a_code(start_with, limits, reward, code):
    quick = JailLimits(cpu_s=20, processes=12, load_s=20, call_s=1.5)
    env = start_with(reward=reward, limits=quick)
    began = time.monotonic()
    with pytest.raises(JailError) as caught:
        play(env)
    assert caught.value.reason.startswith(code)
    assert time.monotonic() - began < 6
    with pytest.raises(JailError, match=r"env\.closed"):
        env.rows(1)


def test_a_forged_answer_is_only_ever_the_jobs_own_score(start_with):
    forged = json.dumps(
        {
            "type": "score_reply",
            "records": [{"reward": 5.0, "rewards": {}, "metrics": {}, "error": None}],
        }
    )
    reward = f"""
import os
body = {forged!r}.encode()
os.write(4, len(body).to_bytes(4, 'big') + body)
"""
    env = start_with(reward=reward)
    assert play(env).reward == 5.0  # a job may say what it likes about its own rollouts
    with pytest.raises(JailError, match=r"env\.protocol"):  # but the next reply is out of step
        env.reset([0])


@pytest.mark.parametrize("code", ["jail.start", "env.jail.start", "train.timeout", "scorer.died"])
def test_a_worker_cannot_blame_the_machine_for_its_end(start_with, code):
    reward = f"""
import os
body = b'{{"type":"fault","code":"{code}","detail":"not my fault"}}'
os.write(4, len(body).to_bytes(4, 'big') + body)
"""
    with pytest.raises(JailError) as caught:
        play(start_with(reward=reward))
    assert caught.value.reason == "env.crashed"


@pytest.mark.long
def test_many_quick_answers_end_with_the_life_of_the_environment(start_with):
    slow = JailLimits(cpu_s=20, processes=12, load_s=20, call_s=2.0, life_s=4.0)
    env = start_with(reward="import time; time.sleep(0.3)", limits=slow)
    began = time.monotonic()
    with pytest.raises(JailError, match="limit of the environment") as caught:
        [play(env) for _ in range(64)]
    assert caught.value.reason == "env.deadline"
    assert time.monotonic() - began < 8


def test_the_last_output_of_a_dying_worker_is_in_the_error(start_with):
    env = start_with(reward="import os, sys\nprint('last words', file=sys.stderr)\nos._exit(3)")
    with pytest.raises(JailError, match="last words"):
        play(env)
    assert "last words" in env.log_tail()


def test_an_error_holds_no_control_characters(start_with):
    evil = (
        "import os\nos.write(1, b'\\x1b[2J\\x1b]0;owned\\x07 \\xe2\\x80\\xae words')\nos._exit(1)"
    )
    with pytest.raises(JailError, match="words") as caught:
        play(start_with(reward=evil))
    assert caught.value.detail.replace("\n", "").isprintable()


@pytest.mark.long
def test_a_nan_reward_is_an_error_of_its_rollout_only(start_with):
    env = start_with(reward="if trace.last_reply == 'x': return float('nan')")
    assert "finite" in str(play(env).error)
    assert play(env, text="fine").error is None


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nfor _ in range(64): os.fork()",
        "import threading, time\nfor _ in range(64): threading.Thread(target=time.sleep, args=(30,)).start()",
        "import subprocess\nkeep = [subprocess.Popen(['/bin/sleep', '30']) for _ in range(64)]",
    ],
)
def test_a_fork_or_thread_bomb_stays_small_and_dies(start_with, bomb):
    quick = JailLimits(cpu_s=10, processes=8, load_s=20, call_s=2)
    env = start_with(reward=bomb, limits=quick)
    namespace = namespace_of(env)
    assert len(members(namespace)) == 3  # bubblewrap's init, the sleeper, the worker
    try:
        record = play(env)
        assert record.error is not None
        assert "Error" in record.error
    except JailError as e:
        assert e.reason.startswith("env.")  # noqa: PT017 (either way is right)
    assert len(members(namespace)) <= 10
    env.close()
    assert emptied(namespace)


def test_a_grandchild_in_its_own_session_dies_with_the_jail(start_with):
    env = start_with(
        reward="""
import os, subprocess
subprocess.Popen(['/usr/bin/setsid', '/bin/sleep', '7654321'], start_new_session=True)
""",
    )
    namespace = namespace_of(env)
    play(env)
    assert len(members(namespace)) >= 4
    env.close()
    assert emptied(namespace)


def test_disk_and_memory_are_bounded(start_with):
    env = start_with(
        reward="""
said = []
try:
    with open('/tmp/a', 'wb') as f:
        for _ in range(64): f.write(bytes(1 << 20))
except OSError as e: said.append(type(e).__name__)
try:
    for k in range(64):
        with open(f'/tmp/{k}', 'wb') as f: f.write(bytes(8 << 20))
except OSError as e: said.append(e.strerror)
try: bytearray(2 << 30)
except MemoryError: said.append('MemoryError')
import signal
raise RuntimeError(' '.join(said))
""",
        on_import="import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
    )
    error = str(play(env).error)
    assert "No space left on device" in error
    assert "MemoryError" in error


def test_open_env_takes_a_folder_and_checks_names(
    tmp_path, jail, zygote, limits, ledger_tools, make_job
):
    for name, content in make_job().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with open_env(tmp_path, ledger_tools, limits, jail=jail, starter=zygote) as env:
        assert len(env.rows(5)) == 5
    for name in ("../x", "/x", "a/../../x"):
        with pytest.raises(ConfigError, match="relative path"):
            open_env({name: b""}, {}, limits, jail=jail, starter=zygote)


def test_job_files_are_gone_after_close(start, make_job):
    env = start(make_job())
    folder: Path = env._folder
    assert folder.exists()
    env.close()
    assert not folder.exists()


SPY = """
import builtins, gc, os, sys
def look():
    seen = {}
    seen['tmp'] = sorted(os.listdir('/tmp'))
    seen['mark'] = getattr(builtins, 'mark', None)
    seen['random'] = __import__('random').random()
    seen['modules'] = sorted(m for m in sys.modules if m.partition('.')[0] in ('nestling', 'environment', 'tools', 'spy'))
    seen['environ'] = dict(os.environ)
    seen['fds'] = sorted(int(fd) for fd in os.listdir('/proc/self/fd'))
    seen['pids'] = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())
    seen['argv'] = sys.argv
    seen['path'] = [p for p in sys.path if 'site-packages' not in p]
    return seen
"""


def test_nothing_leaks_from_one_job_to_the_next(start_with):
    reward = """
import json, os
from environment import taskset
seen = taskset.look()
open('/tmp/left', 'w').write('x')
taskset.builtins.mark = 'was here'
taskset.sys.modules['spy'] = taskset.sys
os.environ['SPY'] = '1'
vf.Trace.spied = True
seen['spied'] = hasattr(vf.State, 'spied')
vf.State.spied = True
taskset.__dict__.setdefault('kept', []).append(os.open('/job', 0))
if os.fork() == 0:
    import time; time.sleep(60); os._exit(0)
print('SEEN ' + json.dumps(seen))
"""
    views = []
    for _ in range(2):
        env = start_with(reward=reward, on_import=SPY)
        assert play(env).error is None
        env.rows(1)
        line = next(k for k in env.log_tail().splitlines() if k.startswith("SEEN "))
        views.append(json.loads(line[5:]))
        env.close()
    assert views[0] == views[1]
    view = views[1]
    mounted = [Path(word) for word in python_runtime().options if word.startswith("/tmp/")]
    assert set(view["tmp"]) == {path.parts[2] for path in mounted}  # of an installation below /tmp
    assert view["mark"] is None
    assert view["spied"] is False
    assert "SPY" not in view["environ"]
    assert not any("nestling.jobs.env_zygote" in name for name in view["modules"])
    assert view["argv"] == ["env"]
    assert set(view["fds"]) <= {0, 1, 2, 3, 4, 5, 6, 7, 8}
    source = str(Path(nestling.__file__).parents[1])
    assert all(source not in entry and "src" not in entry for entry in view["path"])


def test_a_dead_zygote_is_an_error_not_a_hang(jail, limits, ledger_tools, make_job):
    zygote = Zygote(jail)
    zygote._process.kill()
    with pytest.raises(JailError, match=r"jail\.zygote"):
        open_env(make_job(), ledger_tools, limits, jail=jail, starter=zygote)
    zygote.close()
    zygote.close()


def test_a_zygote_needs_a_jail():
    with pytest.raises(ConfigError, match="unsafe"):
        Zygote(Jail(unsafe=True))


@pytest.mark.slow
def test_unsafe_mode_runs_the_same_job_without_a_jail(limits, ledger_tools, make_job):
    with open_env(make_job(), ledger_tools, limits, jail=Jail(unsafe=True)) as env:
        assert play(env).error is None
        pid = env._process.process.pid
    assert not psutil.pid_exists(pid)


def test_a_row_may_not_change_after_it_was_checked(start_with):
    env = start_with(
        reward="""
import sys
for name, module in list(sys.modules.items()):
    if name == "nestling.jobs.env_worker":
        import gc
        host = next(o for o in gc.get_objects() if type(o).__name__ == "VerifiersHost")
        for loaded in host._rows:
            loaded.row = type(loaded.row)(index=loaded.row.index, system_prompt="", prompt="other", data_json="{}")
"""
    )
    env.rows(3)
    play(env)
    with pytest.raises(JailError, match=r"env\.changed_row"):
        env.reset([1])


def test_rows_are_checked_each_time_they_are_fetched(jail, zygote, limits, ledger_tools, make_job):
    seen = []

    def check(rows):
        seen.append(len(rows))
        return "row 5 is a hidden item" if len(rows) > 5 else None

    with open_env(
        make_job(), ledger_tools, limits, jail=jail, starter=zygote, check_rows=check
    ) as env:
        assert len(env.rows(5)) == 5
        with pytest.raises(JailError, match="hidden item") as caught:
            env.rows(6)
    assert caught.value.reason == "env.leak"
    assert seen == [5, 6]


def test_isolation_is_recorded(start, make_job):
    assert start(make_job()).isolation in ("namespaces", "namespaces+cgroup")


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_process_behind(tmp_path):
    tests = Path(__file__).parent
    program = f"""
import sys, time
sys.path.insert(0, {str(tests)!r})
from conftest import PUBLIC_TOOLS, job_with
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits
jail = Jail()
zygote = Zygote(jail)
env = open_env(job_with(), PUBLIC_TOOLS, JailLimits(), jail=jail, starter=zygote)
print(env._process.init_pid, zygote._process.pid, env._folder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        init_pid, zygote_pid, folder = trainer.stdout.readline().split()
        namespace = Path(f"/proc/{init_pid}/ns/pid").stat().st_ino
        assert len(members(namespace)) == 3
        trainer.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(zygote_pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert emptied(namespace)
    assert not psutil.pid_exists(int(zygote_pid))
    shutil.rmtree(folder)


def test_the_client_leaves_no_descriptors(start, make_job):
    start(make_job()).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        start(make_job()).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
