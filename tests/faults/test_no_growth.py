"""Many requests, starts and ends leave nothing behind: descriptors, threads, processes, memory."""

import gc
import os
import threading
import time
from collections import Counter

import psutil
import torch
from descriptors import open_descriptors
from pool.echo_pool import run_step


def held(processes):
    """Descriptors, threads and private bytes of each."""
    gc.collect()  # what earlier tests left goes now, not between two counts
    return [(process.num_fds(), process.num_threads(), process.memory_full_info().uss) for process in processes]


def test_many_requests_of_changing_sizes_leave_nothing_behind(pool_of):
    pool = pool_of(segment_bytes=1 << 20)
    sizes = [1, 1000, 1 << 18, 1 << 20, 300, 1 << 19]
    for turn in range(100):
        run_step(pool, torch.ones(sizes[turn % len(sizes)]))
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pool.status()["pids"])]
    before = held(processes)
    for turn in range(500):
        run_step(pool, torch.ones(sizes[turn % len(sizes)]))
    grown = [
        [now - then for now, then in zip(*pair, strict=True)] for pair in zip(held(processes), before, strict=True)
    ]
    # malloc keeps or gives back a few of the 4 MiB temporaries from step to step; one that leaked would be 500 of them.
    most = (0, 0, 64 << 20)
    assert all(by <= limit for each in grown for by, limit in zip(each, most, strict=True)), f"grown: {grown}"


def test_starting_and_closing_leaves_no_descriptor_thread_or_child(pool_of):
    def held_here():
        gc.collect()
        return Counter((*open_descriptors().elements(), *threading.enumerate(), *psutil.Process().children()))

    before = held_here()
    pool = pool_of(1)
    pool.start()
    assert held_here() - before
    pool.close()
    assert not held_here() - before
    run_step(pool)
    os.kill(pool.status()["pids"][0], 9)
    until = time.monotonic() + 300
    while held_here() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not held_here() - before
