"""Little of everything: it works, or there is one clear error before anything is asked of a rank."""

import pytest

from faults.namespaces import namespaces
from faults.programs import run_program
from faults.soak_models import write_model
from host.fetch import comfyui_path

# A file system in which nobody can make a file, not even root, whom the mode of a folder does not keep out.
READ_ONLY = "/proc/fs"


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


def test_a_pool_works_with_256_descriptors_a_read_only_home_a_read_only_models_folder_and_no_shm(tmp_path):
    """ComfyUI itself takes about a hundred. The real engine, under plans with all kinds of groups."""
    (models := tmp_path / "models").mkdir()
    spec = write_model(models / "model.safetensors", seed=1)
    program = """
        import os, resource, subprocess
        from host.tiny_hosted import call, spec_of
        from parallel_runtime.devices import parse_devices
        from parallel_runtime.plan import ParallelPlan
        from parallel_runtime.pool.pool import Pool
        if INSIDE:  # no file can be made in either: a models folder of others, a container without shared memory
            subprocess.run(["mount", "--bind", "-o", "ro", "MODELS", "MODELS"], check=True)
            subprocess.run(["mount", "--bind", os.environ["HOME"], "/dev/shm"], check=True)
        refusing = ("MODELS", "/dev/shm") if INSIDE else ()
        for folder in (os.environ["HOME"], os.environ["TMPDIR"], *refusing):
            try:
                open(f"{folder}/file", "w")
            except OSError:
                print("no file")
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(150)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        spec = spec_of("MODEL")
        with Pool(parse_devices("cpu:2").devices, threads_per_rank=1, segment_bytes=1 << 16) as pool:
            for plan in ("ulysses=2,weights=sharded", "pipefusion=2"):
                out, = pool.run(spec, ParallelPlan.parse(plan), [call()]).outs
                print(bool(out.isfinite().all()))
    """
    folders = {"HOME": READ_ONLY, "TMPDIR": READ_ONLY, "COMFYUI_PATH": str(comfyui_path())}
    folders["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # made when ComfyUI imports torch's compiler, or that fails
    inside = namespaces("--mount")
    program = program.replace("INSIDE", repr(bool(inside))).replace("MODELS", str(models)).replace("MODEL", spec.path)
    lines = run_program(program, inside=inside, **folders)
    assert lines == ["no file"] * (4 if inside else 2) + ["True", "True"]


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


# A thread of the parent takes 8 MiB and a rank about 50 more than this program has: in the middle between the two.
@pytest.mark.parametrize(("more_mib", "segment_mib"), [(1, 64), (24, 1)])
def test_a_limit_of_memory_below_the_need_is_one_clear_error(more_mib, segment_mib):
    """Below what a segment needs, and below what a rank's torch needs: `ulimit -v`, which ranks inherit.

    A library that meets the limit may as well wait for a thread that it could not start: then the rank is silent.
    """
    program = """
        import resource
        from echo_pool import make_pool, run_step
        from parallel_runtime.errors import PoolError
        import psutil
        limit = psutil.Process().memory_info().vms + (MORE << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        pool = make_pool(1, segment_bytes=SEGMENT << 20, threads_per_rank=1, start_deadline_s=30.0)
        try:
            pool.start()
        except PoolError as error:
            print(str(error).splitlines()[0])
        assert psutil.Process().children() == []
    """
    (line,) = run_program(program.replace("MORE", str(more_mib)).replace("SEGMENT", str(segment_mib)))
    # Where a rank's libraries meet the limit is their business, and some of them end the process there.
    assert "memory" in line or line.startswith("rank 0: "), line
    assert "; " in line, line


def test_memory_that_runs_out_in_a_step_is_named_and_the_next_prompt_is_right():
    """The limit is set in the rank itself, as an operator of containers may, for what it has and 64 MiB more."""
    program = """
        import resource, psutil, torch
        from echo_pool import failure, first_line, make_pool, run_step
        with make_pool(1) as pool:
            run_step(pool)
            (pid,) = pool.status()["pids"]
            limit = psutil.Process(pid).memory_info().vms + (64 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
            error = failure(pool, faults={0: [["allocate", 1 << 30]]})
            print(first_line(error))
            print(torch.equal(run_step(pool).out, torch.arange(10.0)))
    """
    first, rest = run_program(program)
    assert first.startswith("rank 0: RuntimeError: ")
    assert "can't allocate memory" in first
    assert first.endswith(
        "use a smaller image, more ranks, or free that device's memory; the next prompt starts fresh workers"
    )
    assert rest == "True"
