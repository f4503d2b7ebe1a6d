"""Copies between devices that arrive damaged are found at the start, before any image is wrong."""

import logging
from pathlib import Path

import pytest

from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import pool as of_pool
from parallel_runtime.pool.pool import Pool


class Cancelled(Exception):  # noqa: N818
    """What the caller raises to cancel."""


CPUS = (Device("cpu", 0), Device("cpu", 1))


def corrupting_pool(engine="Corrupting", **settings):
    folder = str(Path(__file__).parent)
    return Pool(CPUS, threads_per_rank=1, engine=f"corrupting:{engine}", python_path=(folder,), **settings)


def test_workers_start_again_without_peer_access_and_say_so(caplog):
    """Also when the first request was cancelled before the copies had been checked."""
    caplog.set_level(logging.WARNING)
    with corrupting_pool(check_peers=True) as pool:
        with pytest.raises(Cancelled):
            pool.start(check_cancelled=lambda: cancel_once_there_is_a_mesh(pool))
        assert pool.generation == 1
        pool.start()
        (said,) = [record.getMessage() for record in caplog.records]
        assert "copies between devices arrive damaged (1 wrong bytes at rank 1)" in said
        assert "starting the workers again without peer access" in said
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 0]
        assert (pool.generation, pool.state) == (2, "idle")
        pool.close()
        assert pool.status()["peer_access"] is False, "the next start would find out anew"


def cancel_once_there_is_a_mesh(pool):
    """What the exchange itself needs is there, and the exchange has not been asked for."""
    if pool.status()["meshes"]:
        raise Cancelled


@pytest.mark.parametrize(
    ("engine", "said"), [("Always", r"arrive damaged \(1 wrong .*\)"), ("HangingAlways", r"do not arrive \(.*\)")]
)
def test_copies_that_stay_damaged_or_hang_even_so_are_one_clear_error(engine, said, monkeypatch):
    if engine == "HangingAlways":
        monkeypatch.setattr(of_pool, "PEER_CHECK_S", 1.0)
    with corrupting_pool(engine, check_peers=True) as pool:
        with pytest.raises(PoolError, match=rf"^copies .* {said} even without peer access; run the doc") as e:
            pool.start()
        assert "\n" not in str(e.value)
        assert (pool.generation, pool.state, pool.status()["pids"]) == (2, "failed", [])


@pytest.mark.full
def test_copies_that_hang_are_taken_for_damaged_ones(caplog, monkeypatch):
    """After a deadline of their own, and at no cost of the three failures after which a pool wants its user."""
    assert of_pool.PEER_CHECK_S == 20.0
    monkeypatch.setattr(of_pool, "PEER_CHECK_S", 6.0)  # in which sound copies arrive, however busy the machine
    caplog.set_level(logging.WARNING)
    with corrupting_pool("Hanging", check_peers=True) as pool:
        assert pool.deadline_s == 120.0
        pool.start()
        (said,) = [record.getMessage() for record in caplog.records]
        assert "copies between devices do not arrive (no answer to CHECK and no heartbeat for" in said
        assert "starting the workers again without peer access" in said
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 0]
        status = pool.status()
        assert (pool.generation, pool.state, status["peer_access"]) == (2, "idle", False)
        assert pool._failures.last is None


def test_without_the_check_the_damage_is_there():
    with corrupting_pool(check_peers=False) as pool:
        pool.start()
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 1]


@pytest.mark.parametrize(("devices", "checked"), [("cuda:0 cuda:1", True), ("cuda:0 cuda:0", False), ("cpu:0", False)])
def test_the_check_is_for_devices_that_copy_to_each_other(devices, checked):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    assert Pool(parsed)._check_peers is checked
