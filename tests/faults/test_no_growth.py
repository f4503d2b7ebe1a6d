"""Many requests, starts and ends leave nothing behind: descriptors, threads, processes, memory."""

import os
import threading
import time

import psutil
import torch
from pool.echo_pool import run_step


def test_many_requests_of_changing_sizes_leave_nothing_behind(pool_of):
    pool = pool_of(segment_bytes=1 << 20)
    sizes = [1, 1000, 1 << 18, 1 << 20, 300, 1 << 19]
    for turn in range(100):
        run_step(pool, torch.ones(sizes[turn % len(sizes)]))
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pool.status()["pids"])]
    before = [(process.num_fds(), process.num_threads(), process.memory_full_info().uss) for process in processes]
    for turn in range(500):
        run_step(pool, torch.ones(sizes[turn % len(sizes)]))
    for process, (fds, threads, private) in zip(processes, before, strict=True):
        assert process.num_fds() == fds
        assert process.num_threads() <= threads
        # malloc keeps or gives back a few of the 4 MiB temporaries from step to step
        assert process.memory_full_info().uss <= private + (16 << 20)


def test_starting_and_closing_leaves_no_descriptor_thread_or_child(pool_of):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), psutil.Process().children()

    before = held()
    pool = pool_of(1)
    pool.start()
    assert held() != before
    pool.close()
    assert held() == before
    run_step(pool)
    os.kill(pool.status()["pids"][0], 9)
    until = time.monotonic() + 5.0
    while held() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert held() == before
