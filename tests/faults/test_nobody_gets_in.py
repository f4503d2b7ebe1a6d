"""Nothing of ours is reachable from outside: sockets."""

import os
from pathlib import Path

from pool.echo_pool import run_step

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENING = "0A"


def sockets_of(pid):
    """(local address, state) of every internet socket that a process holds, as the kernel writes them."""
    inodes = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.append((fields[1].rpartition(":")[0], fields[3]))
    return found


def test_no_socket_of_ours_is_reachable_from_outside(pool):
    run_step(pool)
    ranks = [socket for pid in pool.status()["pids"] for socket in sockets_of(pid)]
    assert LISTENING in {state for _, state in ranks}, "gloo listens somewhere, or this test looks in the wrong place"
    assert {address for address, _ in ranks} <= LOOPBACK
    assert sockets_of(os.getpid()) == []
