"""A rank as torchrun's agent starts it: takes its descriptors and becomes the entry of any other rank.

Standard input is a socket that the launcher gave all its ranks: a message for each, with the command lines of all and
three descriptors a rank: its channel, its lifeline, and where it prints. `LOCAL_RANK` says which are its own.
"""

import json
import os
import socket
import sys
from typing import NoReturn

from ..machines.messages import BUNDLE_BYTES
from ..plan import MAX_RANKS
from . import entry

FDS = 3


def main() -> NoReturn:
    """Take what is ours, and run one rank."""
    with socket.socket(fileno=os.dup(0)) as given:
        data, fds, _, _ = socket.recv_fds(given, BUNDLE_BYTES, FDS * MAX_RANKS)
    mine = int(os.environ["LOCAL_RANK"])
    own = fds[FDS * mine : FDS * (mine + 1)]
    for fd in set(fds).difference(own):
        os.close(fd)
    channel, lifeline, output = own
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    if os.getpgid(0) != os.getpid():  # before torch 2.7 the agent starts no session
        os.setsid()
    sys.argv = [sys.argv[0], *json.loads(data)[mine], f"--socket={channel}", f"--lifeline={lifeline}"]
    if f"--rank={os.environ['RANK']}" not in sys.argv:
        raise ValueError(f"torchrun's agent numbers this process {os.environ['RANK']}, its command line {sys.argv}")
    entry.main()


if __name__ == "__main__":
    main()
