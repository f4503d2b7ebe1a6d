"""Windows and macOS: everything imports, and what is missing is said."""

from faults.programs import run_program


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
