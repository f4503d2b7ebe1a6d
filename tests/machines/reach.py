"""Who can reach what: a third host tries every port of the others."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from machines.hosts import Hosts
from machines.world import World
from machines.worlds import FILE, tiny_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

Case = tuple[str, Callable[[], str]]
SCAN = """
import errno, select, socket, sys
host, left, found = sys.argv[1], iter(range(1, 65536)), []
pending, poll = {}, select.epoll()
def begin():
    for port in left:
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        if code == errno.EINPROGRESS:
            pending[sock.fileno()] = sock, port
            poll.register(sock, select.EPOLLOUT)
            return
        found.extend([port] * (code == 0))
        sock.close()
for _ in range(512):
    begin()
while pending:
    ready = poll.poll(5)
    if not ready:
        raise SystemExit("packets vanish")
    for fd, _ in ready:
        sock, port = pending.pop(fd)
        poll.unregister(fd)
        found.extend([port] * (sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0))
        sock.close()
        begin()
print(*found)
"""


def open_ports(hosts: Hosts, host: int, *, seen_from: int = 3) -> set[int]:
    """TCP ports of a host that answer another host."""
    command = [*hosts.inside(seen_from), sys.executable, "-c", SCAN, hosts.address(host)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    return set(map(int, done.stdout.split()))


def reach(hosts: Hosts, folder: Path) -> Iterator[Case]:
    """From nothing to a generation that runs, and back."""

    def expect(host: int, ports: set[int] | int) -> str:
        found = open_ports(hosts, host)
        right = len(found) >= ports if isinstance(ports, int) else found == ports
        return "" if right else f"host{host} answers on {sorted(found)}, not {ports}"

    with hosts:
        hosts.enter(1)
        model = tiny_model(folder)
        with closing(Pool(parse_devices("cpu:2").devices, threads_per_rank=1)) as pool:
            model.error(pool, ParallelPlan(ring=2))
            yield "a scan finds nothing of a pool without machines", lambda: expect(1, set())
        with World(hosts, folder) as world:
            model, port = tiny_model(world.models(1)), {world.server.port}
            world.copy(FILE)
            yield "a scan finds the one port where machines join", lambda: expect(1, port)
            world.join(2, "cpu:1")
            yield "a scan finds nothing of a joined machine", lambda: expect(2, set())
            with closing(
                Pool(parse_devices("cpu:1").devices, threads_per_rank=1, machines=lambda _: world.server.machines())
            ) as pool:
                model.error(pool, ParallelPlan(ring=2))
                # The control: what SECURITY.md says of the store's and gloo's ports is so, and this scan sees them.
                yield "a scan of ComfyUI's side finds the store and gloo while ranks run", lambda: expect(1, 3)
                yield "a scan of a joined machine finds gloo while ranks run", lambda: expect(2, 1)
            yield "a scan finds the one port again when ranks have ended", lambda: expect(1, port)
            yield "a scan finds nothing of a joined machine when ranks have ended", lambda: expect(2, set())
        yield "a scan finds nothing when machines may join no more", lambda: expect(1, set())
