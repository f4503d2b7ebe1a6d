"""The internet sockets that a process holds, as the kernel lists them."""

import os
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENING = "0A"


def sockets_of(pid: int) -> list[tuple[str, str]]:
    """(local address, state) of every internet socket that a process holds, as the kernel writes them."""
    inodes = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.append((fields[1].rpartition(":")[0], fields[3]))
    return found
