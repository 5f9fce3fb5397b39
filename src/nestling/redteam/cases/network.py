"""Data and answers from elsewhere."""

from __future__ import annotations

from nestling.redteam.case import CaseList, Happened
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("network")
CASES = _LIST.cases


def _judged(room: TargetRoom, code: str) -> Happened:
    left = room.in_jail(code)
    found = [*left.done(), *room.traps.sprung()]
    return Happened(
        what="; ".join(found) or "no connection was made",
        succeeded=bool(found) or not left.said,
        evidence=left.said or left.detail,
    )


@_LIST.case(
    "net-tcp",
    act="connect to a listener on this machine's loopback",
    expected="no such socket family, and an empty network namespace",
)
def tcp(room: TargetRoom) -> Happened:
    """IPv4 and IPv6."""
    return _judged(
        room,
        f"""
        attempt("tcp", socket.create_connection, ("127.0.0.1", {room.traps.port}), 2)
        attempt("tcp6", socket.create_connection, ("::1", {room.traps.port}), 2)
        """,
    )


@_LIST.case(
    "net-udp", act="send a datagram to a listener on loopback", expected="no such socket family"
)
def udp(room: TargetRoom) -> Happened:
    """One packet would do."""
    return _judged(
        room,
        f"""
        def send():
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.sendto(b"answers please", ("127.0.0.1", {room.traps.udp_port}))
        attempt("udp", send)
        """,
    )


@_LIST.case(
    "net-names",
    act="resolve a name, through the library and by hand",
    expected="no resolver, no socket",
)
def names(room: TargetRoom) -> Happened:
    """A name can carry data out."""
    return _judged(
        room,
        """
        attempt("getaddrinfo", socket.getaddrinfo, "localhost.example.org", 80)
        attempt("resolv.conf", read, "/etc/resolv.conf")
        attempt("hosts", read, "/etc/hosts")
        """,
    )


@_LIST.case(
    "net-unix",
    act="connect to Unix sockets of this machine, by path and by abstract name",
    expected="the path is not mounted, and abstract names belong to the network namespace",
)
def unix(room: TargetRoom) -> Happened:
    """The one family that is allowed."""
    return _judged(
        room,
        f"""
        def connect(address):
            s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect(address)
        attempt("path", connect, {str(room.traps.local_path)!r})
        attempt("abstract", connect, {room.traps.abstract_name!r})
        for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/systemd/private"):
            attempt(path, connect, path)
        """,
    )


@_LIST.case(
    "net-other-families",
    act="open netlink, packet, vsock, crypto and raw sockets",
    expected="the filter allows Unix sockets only",
)
def other_families(room: TargetRoom) -> Happened:
    """Kernel attack surface."""
    return _judged(
        room,
        """
        for name in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG",
                     "AF_BLUETOOTH", "AF_CAN", "AF_RDS", "AF_TIPC", "AF_QIPCRTR"):
            if hasattr(socket, name):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    attempt(name, socket.socket, getattr(socket, name), kind)
        """,
    )


@_LIST.case(
    "net-programs",
    act="fetch with curl, wget, git, ssh and pip",
    expected="programs run under the same limits: nothing can connect",
)
def programs(room: TargetRoom) -> Happened:
    """Whatever is in /usr/bin."""
    url = f"http://127.0.0.1:{room.traps.port}/"
    return _judged(
        room,
        f"""
        for words in (["curl", "-m", "2", {url!r}], ["wget", "-T", "2", "-t", "1", {url!r}],
                      ["git", "ls-remote", {url!r}], ["ssh", "-p", "{room.traps.port}", "127.0.0.1"]):
            try:
                done = subprocess.run(words, capture_output=True, timeout=3, text=True)
                say(words[0], done.returncode, done.stderr[-80:])
            except (OSError, subprocess.TimeoutExpired) as e: say(words[0], type(e).__name__)
        say("end")
        """,
    )
