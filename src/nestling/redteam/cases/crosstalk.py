"""From one job to another, through whatever they share."""

from __future__ import annotations

from contextlib import closing

from nestling.jobs.rollout_env import FinalRequest
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import SMUGGLED, hostile_job, spy_files
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("between jobs")
CASES = _LIST.cases

_MARK = "left-by-the-job-before"


@_LIST.case(
    "cross-leave-marks",
    act="leave marks in files, modules, environment and memory for the next job to find",
    expected="a fresh jail and a fresh fork for every job",
)
def leave_marks(room: TargetRoom) -> Happened:
    """The zygote is the only thing they have in common."""
    room.in_jail(
        f"""
        import builtins
        builtins.mark = sys.mark = vf.mark = json.mark = {_MARK!r}
        os.environ["MARK"] = {_MARK!r}
        for path in ("/tmp/mark", "/dev/shm/mark", "/var/tmp/mark", "/job/mark"):
            try: open(path, "w").write({_MARK!r})
            except OSError: pass
        """
    )
    left = room.in_jail(
        f"""
        import builtins
        for place in (builtins, sys, vf, json):
            if hasattr(place, "mark"): say("DONE found in", place)
        if {_MARK!r} in str(dict(os.environ)): say("DONE found in the environment")
        for path in ("/tmp", "/dev/shm", "/var/tmp", "/job"):
            if os.path.exists(path + "/mark"): say("DONE found in", path)
        say(sorted(os.listdir("/tmp")))
        """
    )
    return Happened(
        what="; ".join(left.done()) or "nothing was found",
        succeeded=bool(left.done()) or not left.said,
        evidence=left.said,
    )


@_LIST.case(
    "cross-two-at-once",
    act="look for, signal and read a second job that runs beside it",
    expected="two jails share no process, no file and no socket",
)
def two_at_once(room: TargetRoom) -> Happened:
    """Both alive, started by the same zygote."""
    neighbour = spy_files(
        """
        open("/tmp/neighbour", "w").write("here")
        listener = socket.socket(socket.AF_UNIX); listener.bind("\\0neighbour"); listener.listen()
        """
    )
    with closing(room.open_env(neighbour)) as env:
        left = room.in_jail(
            """
            def connect():
                s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect("\\0neighbour")
            attempt("connect", connect)
            attempt("file", read, "/tmp/neighbour")
            for pid in range(2, 3000):
                if pid != os.getpid():
                    try: os.kill(pid, 9)
                    except OSError: continue
                    say("DONE killed", pid)
            """
        )
        (start,) = env.reset([0])
        record = env.score([FinalRequest(rollout_id=start.rollout_id, text="x", stop="done")])[0]
    return Happened(
        what="; ".join(left.done()) or f"the neighbour still answers: {record.reward}",
        succeeded=bool(left.done()) or record.reward != 1.0,
        evidence=left.said or left.detail,
    )


@_LIST.case(
    "cross-rollouts",
    act="keep answers of one rollout for the next through attributes of its task",
    expected="each rollout has its own copy of task, state and tools",
)
def rollouts(room: TargetRoom) -> Happened:
    """The same row twice; the second must not see the first."""
    code = "self.seen = getattr(self, 'seen', 0) + 1\nreturn float(self.seen)"
    with closing(room.open_env(spy_files("", on_score=code, num_rows=2))) as env:
        starts = env.reset([0, 0, 0])
        finals = [FinalRequest(rollout_id=s.rollout_id, text="x", stop="done") for s in starts]
        rewards = [record.reward for record in env.score(finals)]
    return Happened(
        what=f"rewards {rewards}", succeeded=rewards != [1.0, 1.0, 1.0], evidence="three rollouts"
    )


@_LIST.case(
    "cross-hold-the-zygote",
    act="keep every limit of one jail exhausted while another job starts",
    expected="limits are per job: the other starts and answers",
)
def hold(room: TargetRoom) -> Happened:
    """Processes, descriptors, memory and /tmp, held on purpose."""
    greedy = spy_files(
        """
        kept = []
        try:
            while True: kept.append(open("/dev/null"))
        except OSError: kept = kept[:20]
        for _ in range(16):
            try:
                if os.fork() == 0: time.sleep(30); os._exit(0)
            except OSError: break
        try:
            while True: kept.append(bytearray(16 << 20))
        except MemoryError: kept = kept[:20]
        """
    )
    with closing(room.open_env(greedy)):
        left = room.in_jail("say('alive', subprocess.run(['/bin/true']).returncode)")
    return Happened(what=left.said or f"ended: {left.reason}", succeeded="alive 0" not in left.said)


@_LIST.case(
    "cross-training-repeats",
    act="disturb shared generators and clocks, so that another job trains differently",
    expected="an honest job repeats bit for bit whatever ran before",
)
def training_repeats(room: TargetRoom) -> Happened:
    """Honest, hostile, honest."""
    honest = hostile_job()
    before = room.train(honest)
    room.train(hostile_job(on_import=SMUGGLED + "random.seed(os.getpid())\nos.nice(5)\n"))
    after = room.train(honest)
    return Happened(
        what=f"{before.final_hash == after.final_hash=}",
        succeeded=before.final_hash != after.final_hash or before.post != after.post,
        evidence=f"{after.final_hash}",
    )
