"""`python -m machines.strangers --inputs 1000000`: what somebody without the token can send, to a real server's socket.

After each thousand the server is to let a machine with the token join within `DOOR_S`, and its memory and descriptors
are to be what they were. Prints what was sent, last `N inputs, 0 broken`. `make machines-fuzz` runs it; the parsers
behind the token are fuzzed by `make fuzz`.
"""

import argparse
import os
import random
import socket
import struct
import time
from collections import deque

import psutil

from parallel_runtime.machines.connection import ANSWER, GREETING, MAGIC, VERDICT, VERSION, MachineChallenge
from parallel_runtime.machines.messages import FROM_SERVER, Introduction, Versions, Welcome, from_frame, to_frame
from parallel_runtime.machines.server import CHALLENGE_S, MAX_STRANGERS, MachineServer

TOKEN, OTHER = b"t" * 32, b"o" * 32
OURS = Versions(pack="1", torch="2")
EVERY = 1000
DOOR_S = 5.0
MAX_GROWTH_BYTES = 16 << 20
LINGER = struct.pack("ii", 1, 0)  # close sends RST, so that a million connections leave no socket in TIME_WAIT
MAX_OPEN = 2 * MAX_STRANGERS


def stranger(chance: random.Random) -> tuple[bytes, bool]:
    """Bytes of one connection, and whether the greeting is waited for first."""
    kind = chance.randrange(6)
    if kind == 0:
        return b"", chance.random() < 0.5
    if kind == 1:
        return chance.randbytes(chance.choice((1, 10, 41, 73, 74, 75, 500, 5000))), False
    if kind == 2:  # an answer with random proof
        return ANSWER.pack(MAGIC, VERSION, chance.randbytes(32), chance.randbytes(32)), chance.random() < 0.5
    if kind == 3:  # the right form, changed
        data = bytearray(ANSWER.pack(MAGIC, VERSION, chance.randbytes(32), chance.randbytes(32)))
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data[: chance.randrange(len(data) + 1)]), False
    if kind == 4:  # frames without a challenge
        return struct.pack("<I32s", chance.randrange(1 << 32), bytes(32)) + b'{"kind":"Beat","body":{}}', False
    return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", False


def visit(address: tuple[str, int], data: bytes, *, listens: bool) -> socket.socket:
    """One stranger's connection, still open."""
    sock = socket.create_connection(address, timeout=DOOR_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    try:
        if listens:
            sock.recv(GREETING.size)
        sock.sendall(data)
    except OSError:  # the server has closed it for a newer one
        pass
    return sock


def guess(address: tuple[str, int], chance: random.Random) -> str:
    """A stranger who plays by the rules with another token; what is wrong with the answer."""
    with socket.create_connection(address, timeout=DOOR_S) as sock:
        challenge = MachineChallenge(OTHER)
        sock.sendall(challenge.answer(sock.recv(GREETING.size, socket.MSG_WAITALL)) + chance.randbytes(40))
        verdict = sock.recv(VERDICT.size, socket.MSG_WAITALL)
        return "" if verdict in (b"", bytes(VERDICT.size)) else f"a wrong token is answered {verdict!r}"


def joins(address: tuple[str, int]) -> str:
    """A machine with the token; what keeps it out."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=DOOR_S) as sock:
        challenge = MachineChallenge(TOKEN)
        sock.sendall(challenge.answer(sock.recv(GREETING.size, socket.MSG_WAITALL)))
        session = challenge.session(sock.recv(VERDICT.size, socket.MSG_WAITALL))
        sock.sendall(session.frame(to_frame(Introduction(str(began), ("cpu:0",), ("CPU",), OURS, 1))))
        frames = session.take(sock.recv(1 << 16))
    welcome = bool(frames) and isinstance(from_frame(FROM_SERVER, frames[0]), Welcome)
    taken = time.monotonic() - began
    return "" if welcome and taken < DOOR_S else f"a machine with the token is let in: {welcome}, {taken:.1f} s"


def besiege(inputs: int, seed: int) -> list[str]:
    """What was found wrong."""
    chance, found = random.Random(seed), []  # noqa: S311  no secret
    server = MachineServer("127.0.0.1:0", TOKEN, versions=OURS)
    address = (server.host, server.port)
    joins(address)
    process, held = psutil.Process(), deque[socket.socket]()
    memory, others = 0, len(os.listdir("/proc/self/fd"))
    for number in range(1, inputs + 1):
        data, listens = stranger(chance)
        held.append(visit(address, data, listens=listens))
        while len(held) > chance.randrange(MAX_OPEN):
            held.popleft().close()
        if number % EVERY == 0 or number == inputs:
            problems = [guess(address, chance), joins(address)]
            memory = memory or process.memory_info().rss
            grown = process.memory_info().rss - memory
            problems.append("" if grown < MAX_GROWTH_BYTES else f"{grown} bytes more than after the first {EVERY}")
            descriptors = len(os.listdir("/proc/self/fd")) - len(held) - others
            problems.append("" if descriptors < MAX_STRANGERS + 20 else f"{descriptors} descriptors")
            found += [f"after {number} inputs of seed {seed}: {problem}" for problem in problems if problem]
            if len(found) > 4:
                break
    for sock in held:
        sock.close()
    time.sleep(0.5)
    if left := [each for each in server._connections if each.machine is None]:
        found.append(f"{len(left)} connections are left of strangers who have gone")
    server.close()
    print(f"{server.host}: memory grew by {(process.memory_info().rss - memory) / 2**20:.1f} MiB")  # noqa: T201
    return found


def main() -> int:
    """The command line; 1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="machines.strangers", description="Strangers at the door.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = parser.parse_args()
    began = time.monotonic()
    found = besiege(options.inputs, options.seed)
    for line in found:
        print(line)  # noqa: T201
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s, each has {CHALLENGE_S:g} s")  # noqa: T201
    print(f"{options.inputs} inputs, {len(found)} broken")  # noqa: T201
    return min(len(found), 1)


if __name__ == "__main__":
    raise SystemExit(main())
