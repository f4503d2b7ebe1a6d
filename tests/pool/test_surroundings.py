"""What ranks take from their surroundings and what they leave there: sockets, descriptors, files, memory, modules."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from parallel_runtime.devices import Device
from parallel_runtime.pool.process import RankSettings, rank_environment
from pool.echo_pool import HERE, run_step

ROOT = Path(HERE).parents[1]
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


def test_a_rank_is_set_up_for_inference_and_imports_no_model_library(pool):
    about = run_step(pool, about=["torch", "diffusers", "transformers", "comfy", "multiprocessing.queues"]).ranks[1][
        "about"
    ]
    assert about["loaded"] == ["torch"]
    cpus = len(os.sched_getaffinity(0))
    assert (about["threads"], about["interop_threads"], about["grad"]) == (max(1, cpus // 2), 1, False)
    assert about["session"] == pool.status()["pids"][1]
    assert {"PYTHONPATH", "GLOO_SOCKET_IFNAME"} <= set(about["environment"])


def test_a_ranks_environment_is_written_out_not_inherited():
    ours = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": "/elsewhere",
    }
    settings = RankSettings(devices=(Device("cpu", 0),), threads=3, engine="a:B", python_path=("/more",))
    assert rank_environment(ours, settings) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": f"{ROOT}:/more",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


@pytest.mark.parametrize(
    ("devices", "backend"),
    [("cpu:0 cpu:1", "gloo"), ("cuda:0 cuda:1", "nccl"), ("cuda:0 cuda:0", "gloo"), ("cuda:0 cpu:0", "gloo")],
)
def test_ranks_that_share_a_device_talk_over_gloo(devices, backend):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    assert RankSettings(devices=parsed, threads=1, engine="a:B").backend == backend


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


def test_a_rank_that_cannot_be_started_is_one_clear_error_and_leaks_nothing():
    """With too few descriptors for eight ranks; those that were started already are ended."""
    program = """
        import os, resource, sys
        from echo_pool import make_pool, run_step
        from parallel_runtime.errors import PoolError
        import psutil
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 4096))
        pool = make_pool(8)
        try:
            pool.start()
        except PoolError as error:
            print(error)
        assert len(os.listdir("/proc/self/fd")) == before
        assert psutil.Process().children() == []
    """
    expected = "a rank cannot be started: Too many open files; raise the limit of open files (ulimit -n)"
    assert run_program(program) == [expected]


def test_a_pool_works_with_256_descriptors_no_home_and_no_folder_for_files():
    """ComfyUI itself takes about a hundred."""
    program = """
        import os, resource
        from echo_pool import make_pool, run_step
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(150)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with make_pool(4, threads_per_rank=1, segment_bytes=1 << 16) as pool:
            for _ in range(2):
                print(run_step(pool).out.numel())
                pool.close()
    """
    assert run_program(program, HOME="/nonexistent", TMPDIR="/nonexistent") == ["10", "10"]


def test_another_system_can_import_the_pool_and_is_told_what_is_missing():
    program = """
        import os, signal, sys, torch
        sys.modules["fcntl"] = None
        sys.platform = "win32"
        for name in ("memfd_create", "pidfd_open", "eventfd", "waitid", "sched_getaffinity"):
            delattr(os, name)
        from echo_pool import make_pool
        from parallel_runtime.errors import PoolError
        with make_pool(2) as pool:
            try:
                pool.start()
            except PoolError as error:
                print(error)
            print(pool.status()["state"])
    """
    assert run_program(program) == ["workers need Linux, this is win32; use stock nodes on this system", "stopped"]


def run_program(text, **environment):
    """The lines that a process of its own prints."""
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[indent:] for line in lines)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
