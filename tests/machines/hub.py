"""`python -m machines.hub --delay=0.02 port1 port2`: every frame that comes in at one port leaves at all others, later.

`--finished eth0` has the kernel finish the packets of an interface (checksums, segments), as a hub like this needs.
"""

import argparse
import ctypes
import fcntl
import heapq
import itertools
import select
import socket
import struct
import sys
import time
from contextlib import suppress

ETH_P_ALL = 3
SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO = 0x17, 0x1F, 0x24, 0x2C  # linux/ethtool.h
MAX_WAITING = 20_000  # frames; a real switch drops too


def finish_packets(name: str) -> None:
    """Switch off what the kernel would leave to the interface's hardware."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in (ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO):
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            request = struct.pack("=16sQ16x", name.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def forward(names: list[str], delay_s: float) -> None:
    """Never returns."""
    ports = []
    for name in names:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.bind((name, 0))
        port.setblocking(False)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        ports.append(port)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    count = itertools.count()
    print("ready", flush=True)  # noqa: T201
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ports, [], [], left_s)
        for port in ready:
            for _ in range(64):
                try:
                    frame, (_, _, kind, *_) = port.recvfrom(1 << 16)
                except BlockingIOError:
                    break
                if kind != socket.PACKET_OUTGOING and len(waiting) < MAX_WAITING:
                    heapq.heappush(waiting, (time.monotonic() + delay_s, next(count), port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, came_at, frame = heapq.heappop(waiting)
            for port in ports:
                if port is not came_at:
                    with suppress(OSError):  # its queue is full, its cable is cut
                        port.send(frame)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--finished", action="store_true")
    parser.add_argument("interfaces", nargs="+")
    options = parser.parse_args(sys.argv[1:])
    if options.finished:
        for interface in options.interfaces:
            finish_packets(interface)
    else:
        forward(options.interfaces, options.delay)
