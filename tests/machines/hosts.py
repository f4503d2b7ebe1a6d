"""Network namespaces as machines: each has one interface, all meet at one switch, and any cable can be slowed or cut.

Owns namespaces, addresses and cables, all of which go when this process ends. Does not own what runs in them. Root in a
user namespace of its own is enough (`enter_namespaces`).

    host 1 (10.77.0.1) --veth-- switch --veth-- host 2 (10.77.0.2) ...

The switch is a bridge of the kernel's, or, with a delay, a hub of ours (`python -m machines.hub`): not every kernel has
`netem`.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECLARED = "PARALLEL_DIT_NO_NAMESPACES"
INSIDE = "PARALLEL_DIT_INSIDE_NAMESPACES"
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
OWN_USER = ("--user", "--map-root-user")
KINDS = ("--net", "--")


class NoNamespacesError(RuntimeError):
    """The kernel, or the container, refuses namespaces."""


def enter_namespaces() -> None:
    """Start this program again in a network of its own, once. Raises NoNamespacesError where that is refused."""
    if os.environ.get(INSIDE):
        return
    for more in ((), OWN_USER):
        command = ["unshare", *more, *KINDS]
        try:
            tried = subprocess.run([*command, "ip", "link", "add", "x", "type", "veth"], capture_output=True, text=True)
        except FileNotFoundError as error:
            raise NoNamespacesError(f"{error.filename} is missing; install util-linux and iproute2") from error
        if tried.returncode == 0:
            module = sys.modules["__main__"].__spec__.name
            arguments = [*command, sys.executable, "-m", module, *sys.argv[1:]]
            os.execvpe(arguments[0], arguments, {**os.environ, INSIDE: "1"})  # noqa: S606
    raise NoNamespacesError(f"no network namespaces with veth here ({tried.stderr.strip()})")


class Hosts:
    """`count` hosts; a context. `delay_s` is the way of every packet between two of them.

    With `ipv6` they have no IPv4 address but 127.0.0.1.
    """

    def __init__(self, count: int, *, delay_s: float = 0.0, ipv6: bool = False) -> None:
        self.count, self._ipv6 = count, ipv6
        self.link = f", {1000 * delay_s:g} ms" if delay_s else ""  # in a case's name
        self._held = ExitStack()
        self._switch = self._namespace()
        self._pids = [self._namespace() for _ in range(count)]
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._wire(delay_s)
            undo.pop_all()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Namespaces, interfaces and the hub go; what runs in a namespace keeps it."""
        self._held.close()

    def address(self, host: int) -> str:
        """Of host 1 and following."""
        return f"fd77::{host}" if self._ipv6 else f"10.77.0.{host}"

    def inside(self, host: int) -> list[str]:
        """The command that runs another on that host."""
        return _inside(self._pids[host - 1])

    def enter(self, host: int) -> None:
        """Have this thread, and what it starts, be on that host."""
        with open(f"/proc/{self._pids[host - 1]}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def rate(self, rate: str | None) -> None:
        """Limit every cable both ways, "1gbit"; None: as fast as it goes."""
        for host in range(1, self.count + 1):
            self._queue(host, None if rate is None else ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"])

    def cut(self, host: int) -> None:
        """Pull the host's cable: packets vanish both ways, and nobody is told."""
        self._queue(host, ["blackhole"])

    def mend(self, host: int) -> None:
        """Plug it in again."""
        self._queue(host, None)

    def _queue(self, host: int, kind: Sequence[str] | None) -> None:
        for inside, device in ((self.inside(host), "eth0"), (_inside(self._switch), f"port{host}")):
            if kind is None:
                subprocess.run([*inside, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            else:
                _run([*inside, "tc", "qdisc", "replace", "dev", device, "root", *kind])

    def _namespace(self) -> int:
        command = ["unshare", "--net", "sleep", "infinity"]
        holder = subprocess.Popen(command, preexec_fn=die_with_parent)
        self._held.callback(holder.wait)
        self._held.callback(holder.kill)
        own, until = os.stat("/proc/self/ns/net").st_ino, time.monotonic() + 300
        while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == own:
            if time.monotonic() > until or holder.poll() is not None:
                raise NoNamespacesError("unshare --net made no namespace")
            time.sleep(0.01)
        return holder.pid

    def _wire(self, delay_s: float) -> None:
        switch = _inside(self._switch)
        _run([*switch, "ip", "link", "set", "lo", "up"])
        for host, pid in enumerate(self._pids, start=1):
            inside = _inside(pid)
            end = ["type", "veth", "peer", "name", "eth0", "netns", str(pid)]
            _run([*switch, "ip", "link", "add", f"port{host}", *end])
            _run([*switch, "ip", "link", "set", f"port{host}", "up"])
            _run([*inside, "ip", "link", "set", "lo", "up"])
            bits = ["64", "nodad"] if self._ipv6 else ["24"]  # nodad: the address serves at once
            _run([*inside, "ip", "address", "add", f"{self.address(host)}/{bits[0]}", "dev", "eth0", *bits[1:]])
            _run([*inside, "ip", "link", "set", "eth0", "up"])
        ports = [f"port{host}" for host in range(1, self.count + 1)]
        if delay_s == 0:
            _run([*switch, "ip", "link", "add", "bridge0", "type", "bridge", "forward_delay", "0"])
            _run([*switch, "ip", "link", "set", "bridge0", "up"])
            for port in ports:
                _run([*switch, "ip", "link", "set", port, "master", "bridge0"])
            return
        for pid in self._pids:  # a hub of ours cannot finish packets that the kernel left to hardware
            _run([*_inside(pid), sys.executable, "-m", "machines.hub", "--finished", "eth0"])
        hub = subprocess.Popen(
            [*switch, sys.executable, "-m", "machines.hub", f"--delay={delay_s}", *ports],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
            env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        )
        self._held.callback(hub.wait)
        self._held.callback(hub.kill)
        if hub.stdout is None or not hub.stdout.readline():
            raise RuntimeError("the hub does not start")


def _inside(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def die_with_parent() -> None:
    """For a child that is starting: it ends when this thread does, however."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
