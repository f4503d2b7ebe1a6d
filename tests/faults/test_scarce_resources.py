"""Little of everything: it works, or there is one clear error before anything starts."""

from faults.programs import run_program


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
