"""What code in a jail can see and do, told by code in a jail."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

import nestling
from nestling.core.errors import ConfigError, JailError
from nestling.jobs.env_client import open_env
from nestling.jobs.jail import Jail, JailLimits, require_bubblewrap
from nestling.jobs.jail_cgroup import JailCgroup
from nestling.jobs.jail_confine import Confinement
from nestling.jobs.jail_runtime import WORKER_FILES, python_runtime
from nestling.jobs.jail_seccomp import seccomp_program
from nestling.jobs.rollout_env import FinalRequest

SPY = """
import ctypes, errno, importlib, json, os, resource, socket, subprocess, sys

def attempt(function, *arguments):
    try:
        return str(function(*arguments))[:200] or "nothing"
    except BaseException as e:
        return f"refused {type(e).__name__} {getattr(e, 'errno', '')}"

def read(path):
    return open(path, "rb").read(64)

def system_call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]

def internet():
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.connect(("127.0.0.1", 22))

def local_socket():
    s = socket.socket(socket.AF_UNIX)
    s.connect(SECRETS["socket"])

def look(SECRETS_IN):
    global SECRETS
    SECRETS = SECRETS_IN
    seen = {}
    for path in SECRETS["files"]:
        seen["read " + path] = attempt(read, path)
    for folder in SECRETS["folders"]:
        seen["list " + folder] = attempt(os.listdir, folder)
    for module in SECRETS["modules"]:
        seen["import " + module] = attempt(importlib.import_module, module)
    for path in ("/x", "/usr/x", "/job/x", "/etc/x", "/dev/x", "/nestling/x", "/proc/x", sys.executable + "x"):
        seen["write " + path] = attempt(open, path, "w")
    seen["internet"] = attempt(internet)
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"):
        seen["socket " + family] = attempt(socket.socket, getattr(socket, family), socket.SOCK_DGRAM)
    seen["socket AF_UNIX"] = attempt(socket.socketpair)
    seen["unix socket of the host"] = attempt(local_socket)
    seen["name lookup"] = attempt(socket.getaddrinfo, "example.org", 80)
    for name, number in SECRETS["calls"].items():
        seen["call " + name] = attempt(system_call, number, 0, 0, 0, 0, 0)
    seen["clone with a user namespace"] = attempt(system_call, SECRETS["clone"], 0x10000000 | 17, 0, 0, 0, 0)
    seen["become root"] = attempt(os.setuid, 0) if os.getuid() != 0 else "refused: maps to nobody"
    seen["raise limit"] = attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (4096, 4096))
    seen["kill parent"] = attempt(os.kill, os.getppid() or 999999, 9)
    seen["mknod"] = attempt(os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0))
    seen["chroot"] = attempt(os.chroot, "/tmp")
    seen["status"] = open("/proc/self/status").read()
    seen["pids"] = [int(p) for p in os.listdir("/proc") if p.isdigit()]
    seen["root"] = sorted(os.listdir("/"))
    seen["home"] = os.environ["HOME"]
    seen["environ"] = sorted(os.environ)
    seen["own environ"] = attempt(read, "/proc/self/environ")
    for pid in seen["pids"]:
        if pid != os.getpid():
            seen[f"other environ {pid}"] = attempt(read, f"/proc/{pid}/environ")
            seen[f"other memory {pid}"] = attempt(read, f"/proc/{pid}/mem")
            seen[f"other cmdline {pid}"] = attempt(lambda: open(f"/proc/{pid}/cmdline").read())
    seen["mounts"] = open("/proc/self/mountinfo").read()
    seen["interfaces"] = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
    seen["hostname"] = socket.gethostname()
    seen["uid"] = os.getuid()
    seen["groups"] = os.getgroups()
    seen["limits"] = {n: resource.getrlimit(getattr(resource, n)) for n in ("RLIMIT_CORE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU")}
    seen["session"] = attempt(open, "/dev/tty")
    seen["nestling"] = sorted(os.path.join(d, f) for base in ["/nestling", *sys.path] for d, _, fs in os.walk(os.path.join(base, "nestling")) for f in fs if not f.endswith(".pyc"))
    seen["oom"] = open("/proc/self/oom_score_adj").read().strip()
    seen["tmp"] = attempt(open, "/tmp/x", "w")
    seen["tmp_files"] = os.statvfs("/tmp").f_files
    seen["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
    seen["autogroup"] = attempt(lambda: open("/proc/self/autogroup").read().split()[-1])
    return seen
"""

CALLS = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "keyctl": 250,
        "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "perf_event_open": 298,
        "process_vm_readv": 310, "kexec_load": 246, "init_module": 175, "clone3": 435,
        "open_tree": 428, "fsopen": 430, "personality": 135, "pivot_root": 155, "clone": 56,
        "x32 getpid": 0x40000000 + 39, "memfd_create": 319, "shmget": 29, "shmat": 30, "semget": 64,
        "msgget": 68,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "unshare": 97, "setns": 268, "keyctl": 219, "bpf": 280,
        "io_uring_setup": 425, "perf_event_open": 241, "clone3": 435, "clone": 220,
        "memfd_create": 279, "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186,
    },
}[platform.machine()]  # fmt: skip


@pytest.fixture(scope="session", params=["warm", pytest.param("cold", marks=pytest.mark.slow)])
def seen(request, jail, zygote, tmp_path_factory) -> dict[str, Any]:
    """The report of a spy; one jail for all tests of this module."""
    base = tmp_path_factory.mktemp("host")
    secret = base / "secret.txt"
    secret.write_text("canary-7f3a")
    package = Path(nestling.__file__).parent
    calls = dict(CALLS)
    secrets = {
        "files": [
            "/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/kcore", "/dev/mem", str(secret),
            str(package / "families" / "family.py"), str(package / "core" / "seeds.py"),
            str(Path(sys.prefix) / "pyvenv.cfg"),
        ],
        "folders": [str(Path.home()), str(base), str(package), str(Path.cwd()), "/root", "/home",
                    "/var", "/sys", "/run", "/boot", "/mnt", "/srv", "/opt"],
        "modules": ["nestling.families", "nestling.engine", "nestling.core.seeds",
                    "nestling.jobs.env_client", "nestling.jobs.jail", "nestling.families.splits"],
        "calls": {name: number for name, number in calls.items() if name != "clone"},
        "clone": calls["clone"],
        "socket": str(base / "socket"),
    }  # fmt: skip
    taskset = f"""
import json
import verifiers.v1 as vf
from environment import spy

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def spying(self, trace) -> float:
        with open("/tmp/report", "w") as f:
            json.dump(spy.look(json.loads({json.dumps(secrets)!r})), f)
        print("REPORT " + open("/tmp/report").read(), flush=True)
        return 1.0

class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="look"), self.config.task)
"""
    job = {
        "environment/__init__.py": b"from environment.taskset import Taskset\n__all__ = ['Taskset']",
        "environment/taskset.py": taskset.encode(),
        "environment/spy.py": SPY.encode(),
    }
    os.environ["NESTLING_TEST_SECRET"] = "canary-7f3a"
    try:
        starter = zygote if request.param == "warm" else None
        limits = JailLimits(processes=12, call_s=20)
        with open_env(job, {}, limits, jail=jail, starter=starter) as env:
            env._log.clear()
            (begun,) = env.reset([0])
            final = FinalRequest(rollout_id=begun.rollout_id, text="", stop="done")
            (record,) = env.score([final])
            assert record.error is None, record.error
            env.rows(1)
            assert env._process is not None
            job_report = _report(env)
    finally:
        del os.environ["NESTLING_TEST_SECRET"]
    return job_report


def _report(env: Any) -> dict[str, Any]:
    line = next(k for k in env.log_tail().splitlines() if "REPORT " in k)
    return json.loads(line.partition("REPORT ")[2])


def refused(seen: dict[str, Any], prefix: str) -> None:
    answers = {key: value for key, value in seen.items() if key.startswith(prefix)}
    assert answers
    for key, value in answers.items():
        assert value.startswith("refused") or value in ("EPERM", "ENOSYS"), (key, value)


@pytest.mark.parametrize(
    "prefix",
    ["import ", "write ", "internet", "socket AF_INET", "socket AF_NETLINK", "socket AF_PACKET",
     "socket AF_VSOCK", "socket AF_ALG", "unix socket of the host", "name lookup", "call ",
     "clone with", "become root", "raise limit", "kill parent", "mknod", "chroot",
     "other environ", "other memory", "session"],
)  # fmt: skip
def test_refused(seen, prefix):
    refused(seen, prefix)


def test_files_of_the_host_are_not_there(seen):
    mounted = {part for option in python_runtime().options for part in Path(option).parts}
    for key, value in seen.items():
        if key.startswith("read "):
            assert value.startswith("refused"), (key, value)
        if key.startswith("list "):
            on_the_way = value.startswith("[") and set(ast.literal_eval(value)) <= mounted
            assert value.startswith("refused") or on_the_way, (key, value)
    assert "canary" not in json.dumps(seen)


def test_of_this_package_only_the_workers_files_are_there(seen):
    found = {name.partition("/nestling/nestling/")[2] for name in seen["nestling"]}
    assert found - {""} == set(WORKER_FILES)


def test_no_privileges_and_a_filter(seen):
    status = dict(line.split(":", 1) for line in seen["status"].splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0
    assert int(status["NoNewPrivs"]) == 1
    assert int(status["Seccomp"]) == 2
    assert seen["groups"] in ([], [seen["uid"]], [65534])
    if os.geteuid() == 0:
        assert seen["uid"] >= 60000


def test_empty_files_cannot_eat_kernel_memory(seen, request):
    if "warm" in request.node.name:  # a cold start has no privilege left to set this
        assert 0 < seen["tmp_files"] <= 4096


def test_own_world(seen):
    assert len(seen["pids"]) <= 4
    assert seen["interfaces"] in ([], ["lo"])
    assert seen["hostname"] == "jail"
    assert seen["home"] == "/tmp"
    assert "NESTLING_TEST_SECRET" not in seen["environ"]
    assert seen["oom"] == "1000"
    assert seen["limits"]["RLIMIT_CORE"] == [0, 0]
    assert seen["limits"]["RLIMIT_NPROC"] == [12, 12]
    assert seen["limits"]["RLIMIT_NOFILE"] == [64, 64]
    assert not seen["tmp"].startswith("refused")
    assert seen["socket AF_UNIX"].startswith("(<socket")


def test_trusted_processes_go_first(seen):
    assert seen["niceness"] == 19
    if Path("/proc/self/autogroup").exists():
        assert seen["autogroup"] == "19"


def test_every_mount_is_read_only_but_tmp_proc_and_devices(seen):
    for line in seen["mounts"].splitlines():
        fields = line.split()
        point, options = fields[4], fields[5].split(",")
        if point not in ("/tmp", "/proc") and not point.startswith("/dev/"):
            assert "ro" in options, line
        assert "nosuid" in options, line


def test_the_filter_is_well_formed_for_every_machine():
    for machine in ("x86_64", "aarch64"):
        program = seccomp_program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
    with pytest.raises(ConfigError, match="riscv64"):
        seccomp_program("riscv64")


def test_missing_bubblewrap_says_how_to_install_it(monkeypatch):
    require_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        Jail()
    require_bubblewrap.cache_clear()
    assert Jail(unsafe=True).unsafe


def test_an_old_bubblewrap_is_refused(monkeypatch, tmp_path):
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    require_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *a, **k: str(old))
    with pytest.raises(ConfigError, match=r"0\.4\.1"):
        Jail()
    require_bubblewrap.cache_clear()


def test_a_kernel_that_refuses_namespaces_is_named(monkeypatch, tmp_path):
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.9.0 && exit\n"
        "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n"
    )
    refusing.chmod(0o755)
    require_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *a, **k: str(refusing))
    with pytest.raises(ConfigError, match="uid map: Permission denied"):
        Jail()
    require_bubblewrap.cache_clear()


def test_a_jail_that_cannot_start_is_an_error_with_its_words(jail, tmp_path, limits):
    with pytest.raises(JailError, match=r"jail\.start") as caught:
        open_env({}, {}, limits, jail=jail, starter=_Broken(jail))
    assert "nosuchfolder" in str(caught.value)


class _Broken:
    """A starter whose job folder is missing."""

    def __init__(self, jail: Jail) -> None:
        self.jail = jail

    def start_worker(self, *, job_dir, limits, request_fd, reply_fd, log_fd):
        process = self.jail.start_command(
            ["/bin/true"],
            job_dir=Path("/nosuchfolder"),
            limits=limits,
            keep_fds=(),
            log_fd=log_fd,
        )
        process.process.wait(timeout=10)
        process.kill()
        raise JailError("jail.start", "ended")


def test_confinement_survives_the_command_line():
    confinement = Confinement(
        cpu_s=1, memory_bytes=2, processes=3, file_bytes=4, open_files=5, uid=None
    )
    assert Confinement.unpack(confinement.pack()) == confinement


def test_a_cgroup_is_made_or_skipped():
    group = JailCgroup.create(memory_bytes=1 << 30, processes=16)
    if group is not None:
        assert (group.path / "pids.max").read_text().strip() == "16"
        group.remove()
        assert not group.path.exists()


def test_the_runtime_mounts_no_home_folder():
    options = python_runtime().options
    sources = {options[at + 1] for at, word in enumerate(options) if word == "--ro-bind"}
    assert str(Path.home()) not in sources
    assert "/" not in sources
    assert "/etc" not in sources


@pytest.mark.long
def test_works_from_an_installation_below_tmp(jail):
    """Which the private /tmp of the jail must not hide: modules may be imported late."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        (own,) = Path(folder).glob("lib/python3*/site-packages")
        (own / "late_module.py").write_text("WORD = 'here'\n")
        packages = [p for p in sys.path if p.endswith("site-packages")]
        (own / "others.pth").write_text("\n".join(packages))
        program = f"""
import sys
sys.path.insert(0, {str(Path(nestling.__file__).parents[1])!r})
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits
from nestling.redteam.hostile_job import spy_files
files = spy_files("import late_module\\nopen('/tmp/x', 'w').close()\\nsay(late_module.WORD)")
jail = Jail()
with Zygote(jail) as zygote:
    for starter in (zygote, None):
        with open_env(files, {{}}, JailLimits(), jail=jail, starter=starter) as env:
            print(env.rows(1)[0].prompt)
"""
        done = subprocess.run(
            [f"{folder}/bin/python", "-c", program],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.stdout.split() == ["here", "here"], done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_works_for_an_ordinary_user(tmp_path_factory):
    """Under another user id, with a Python that user may read."""
    python = Path("/usr/bin") / f"python3.{sys.version_info.minor}"
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    source = str(Path(nestling.__file__).parents[1])
    readable = all(
        parent.stat().st_mode & stat.S_IXOTH for parent in Path(packages).resolve().parents
    )
    if not python.exists() or not readable:
        pytest.skip("no system Python of this version, or packages in a private folder")
    program = f"""
import sys
sys.path[:0] = [{source!r}, {packages!r}]
from nestling.jobs.env_client import open_env
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits
taskset = '''
import os, verifiers.v1 as vf
class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def r(self, trace) -> float:
        return float(open("/proc/self/status").read().count("CapEff:\\t0000000000000000"))
class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="x"), self.config.task)
'''
job = {{"environment/__init__.py": taskset.encode() + b"__all__ = ['Taskset']\\n"}}
from nestling.jobs.rollout_env import FinalRequest
jail = Jail()
with Zygote(jail) as zygote:
    for starter in (zygote, zygote, None):
        with open_env(job, {{}}, JailLimits(), jail=jail, starter=starter) as env:
            (start,) = env.reset([0])
            print(env.score([FinalRequest(rollout_id=start.rollout_id, text="", stop="done")])[0])
"""
    done = subprocess.run(
        [str(python), "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        user=1500,
        group=1500,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reward=1.0") == 3, done.stdout
