"""A process that owns a pool, for tests that end it: `python parent.py WHEN`.

It prints its ranks' processes once they are as WHEN says, then does what it reads: `exec`, `crash` (abort in the middle
of C code, the interpreter's lock held) or `hold` (never give that lock back).

WHEN, once the thread that made the ranks has ended, which they are to outlive: `idle`; `stepping` (two in an exchange,
while one of another pool starts); `holding` (it has a child and never returns to its interpreter); `leaked` (another
child of ours holds every descriptor that we have).
"""

import ctypes
import os
import re
import resource
import subprocess
import sys
import threading
import time

from echo_pool import is_alive, make_pool, run_step

ACTIONS = {
    "stepping": [["exchange", 8 << 20, 3600.0]],
    "holding": [["start_child", "/dev/null"], ["hold_the_interpreter"]],
}


def main(when):
    """Bring the ranks into the state, then obey."""
    num_ranks = 2 if when == "stepping" else 1
    pool = make_pool(num_ranks)
    maker = threading.Thread(target=run_step, args=(pool,), daemon=True)
    maker.start()
    maker.join()
    time.sleep(0.5)
    alive = all(map(is_alive, pool.status()["pids"]))
    assert pool.state == "idle" and alive, "ranks ended with the thread that made them"
    if when in ACTIONS:
        asked = {"faults": {rank: ACTIONS[when] for rank in range(num_ranks)}}
        threading.Thread(target=run_step, args=(pool,), kwargs=asked, daemon=True).start()
        while pool.state != "busy":
            time.sleep(0.001)
        time.sleep(0.3)
    if when == "leaked":
        leak_descriptors()
    pools = [pool, *([starting()] if when == "stepping" else [])]
    answer(*(pid for each in pools for pid in each.status()["pids"]))
    for line in sys.stdin:
        if line.startswith("exec"):
            become("import time; print('replaced', flush=True); time.sleep(120)")
        if line.startswith("crash"):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.PyDLL(None).abort()  # PyDLL, unlike CDLL, keeps the lock
        if line.startswith("hold"):
            answer("holding")
            re.match("(a+)+$", "a" * 60 + "b")


def starting():
    """A pool whose rank has begun to start."""
    pool = make_pool(1)
    threading.Thread(target=pool.start, daemon=True).start()
    while not pool.status()["pids"]:
        time.sleep(0.001)
    return pool


def answer(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def become(program):
    """Go on as another program, the same process."""
    os.execv(sys.executable, [sys.executable, "-c", program])  # noqa: S606  no shell is the point


def leak_descriptors():
    """Start a child that inherits everything, as a careless extension may."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            os.set_inheritable(int(name), True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)


if __name__ == "__main__":
    main(sys.argv[1])
