"""Copies between devices that arrive damaged are found at the start, before any image is wrong."""

import logging
from pathlib import Path

import pytest
from pool.echo_pool import wait_until

from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

CPUS = (Device("cpu", 0), Device("cpu", 1))


def corrupting_pool(engine="Corrupting", **settings):
    folder = str(Path(__file__).parent)
    return Pool(CPUS, threads_per_rank=1, engine=f"corrupting:{engine}", python_path=(folder,), **settings)


def test_workers_start_again_without_peer_access_and_say_so(caplog):
    caplog.set_level(logging.WARNING)
    with corrupting_pool(check_peers=True) as pool:
        pool.start()
        (said,) = [record.getMessage() for record in caplog.records]
        assert "copies between devices arrive damaged (1 wrong bytes at rank 1)" in said
        assert "starting the workers again without peer access" in said
        assert pool.status()["peer_access"] is False
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 0]
        assert (pool.generation, pool.state) == (2, "idle")
        pool.close()
        pool.start()  # what was found is remembered
        assert (pool.generation, len(caplog.records)) == (3, 1)


def test_a_cancelled_check_is_made_up_for_by_the_next_request():
    class Cancelled(Exception):  # noqa: N818
        pass

    def cancel():
        if pool.status()["meshes"]:
            raise Cancelled

    with corrupting_pool(check_peers=True) as pool:
        with pytest.raises(Cancelled):
            pool.start(check_cancelled=cancel)
        wait_until(lambda: pool.state in ("busy", "idle"))
        pool.start()
        assert pool.status()["peer_access"] is False
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 0]


def test_copies_that_stay_damaged_are_one_clear_error():
    with corrupting_pool("Always", check_peers=True) as pool:
        with pytest.raises(
            PoolError, match=r"^copies .* damaged \(1 wrong .*\) even without peer access; run the doc"
        ) as e:
            pool.start()
        assert "\n" not in str(e.value)
        assert (pool.state, pool.status()["pids"]) == ("failed", [])


def test_without_the_check_the_damage_is_there():
    with corrupting_pool(check_peers=False) as pool:
        pool.start()
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 1]


@pytest.mark.parametrize(("devices", "checked"), [("cuda:0 cuda:1", True), ("cuda:0 cuda:0", False), ("cpu:0", False)])
def test_the_check_is_for_devices_that_copy_to_each_other(devices, checked):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    assert Pool(parsed)._check_peers is checked
