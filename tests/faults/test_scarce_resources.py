"""Little of everything: it works, or there is one clear error before anything is asked of a rank.

Of what a run gets by with: test_hostile_machine.py.
"""

import pytest

from faults.namespaces import namespaces
from faults.programs import run_program

# One after the other, so that torch is imported once: what is short, how much of it there is, and how many ranks start.
# A thread of the parent takes 8 MiB and a rank about 50 more than this program has: 24 are between the two.
SHORTAGES = """
    import os, resource, psutil
    from echo_pool import make_pool
    from parallel_runtime.errors import PoolError

    def start(short, most, num_ranks, **settings):
        limit = resource.getrlimit(short)
        resource.setrlimit(short, (most, limit[1]))
        try:
            make_pool(num_ranks, threads_per_rank=1, start_deadline_s=30.0, **settings).start()
        except PoolError as error:
            print(str(error).splitlines()[0])
        resource.setrlimit(short, limit)
        assert psutil.Process().children() == []

    def start_with(more_mib, segment_mib):
        there = psutil.Process().memory_info().vms
        start(resource.RLIMIT_AS, there + (more_mib << 20), 1, segment_bytes=segment_mib << 20)

    before = len(os.listdir("/proc/self/fd"))
    start(resource.RLIMIT_NOFILE, 24, 8)
    assert len(os.listdir("/proc/self/fd")) == before
    start_with(1, 64)
    start_with(24, 1)
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The first lines of the errors, in order."""
    return run_program(SHORTAGES)


def test_a_rank_that_cannot_be_started_is_one_clear_error_and_leaks_nothing(said: list[str]) -> None:
    """With too few descriptors for eight ranks; those that were started already are ended."""
    assert said[0] == "a rank cannot be started: Too many open files; raise the limit of open files (ulimit -n)"


@pytest.mark.parametrize("number", [1, 2], ids=["a segment", "torch in a rank"])
def test_a_limit_of_memory_below_the_need_is_one_clear_error(said: list[str], number: int) -> None:
    """Below what a segment needs, and below what a rank's torch needs: `ulimit -v`, which ranks inherit.

    A library that meets the limit may as well wait for a thread that it could not start: then the rank is silent.
    """
    line = said[number]
    # Where a rank's libraries meet the limit is their business, and some of them end the process there.
    assert "memory" in line or line.startswith("rank 0: "), line
    assert "; " in line, line


@pytest.mark.full
def test_a_pool_works_on_a_machine_whose_small_disks_are_full(tmp_path):
    """64 MB of /dev/shm for tensors of 80 MB, and a temporary folder and a home without a byte left."""
    program = """
        import mmap, os, subprocess, sys, torch
        from echo_pool import make_pool, run_step

        def small_disk(folder, options):
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

        def fill(folder):
            with open(f"{folder}/filler", "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()
                except OSError as error:
                    return error.strerror

        if INSIDE:
            small_disk("/dev/shm", "size=64m")
            small_disk("FOLDER", "size=1m")
            os.environ["HOME"] = os.environ["TMPDIR"] = "FOLDER"
            print(fill("FOLDER"))
        free = os.statvfs("/dev/shm").f_bavail
        with make_pool(2, threads_per_rank=1) as pool:
            given = torch.ones(20_000_000)
            print(torch.equal(run_step(pool, given, add=1).out, given + 1))
            for pid in (os.getpid(), *pool.status()["pids"]):
                assert "/dev/shm" not in open(f"/proc/{pid}/maps").read()
        assert os.statvfs("/dev/shm").f_bavail == free or not INSIDE
    """
    inside = namespaces("--mount")
    program = program.replace("INSIDE", repr(bool(inside))).replace("FOLDER", str(tmp_path))
    lines = run_program(program, inside=inside)
    assert lines == (["No space left on device"] if inside else []) + ["True"]
