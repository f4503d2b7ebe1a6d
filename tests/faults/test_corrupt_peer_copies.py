"""Copies between devices that arrive damaged, or never, or at which CUDA fails: found at the start, before any image is
wrong."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import pool as of_pool
from parallel_runtime.pool.pool import Pool


class Cancelled(Exception):  # noqa: N818
    """What the caller raises to cancel."""


CPUS = (Device("cpu", 0), Device("cpu", 1))


def corrupting_pool(engine="Corrupting", devices=CPUS, **settings):
    folder = str(Path(__file__).parent)
    return Pool(devices, threads_per_rank=1, engine=f"corrupting:{engine}", python_path=(folder,), **settings)


def started_again(pool, caplog):
    """Start a pool, whose workers start twice and do without peer access then; returns why, as it was said once."""
    caplog.set_level(logging.WARNING)
    pool.start()
    (said,) = [record.getMessage() for record in caplog.records]
    why, again, _ = said.partition("; starting the workers again without peer access")
    assert again
    assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 0]
    assert (pool.generation, pool.state, pool.status()["peer_access"]) == (2, "idle", False)
    return why


def test_workers_start_again_without_peer_access_and_say_so(caplog):
    """Also when the first request was cancelled before the copies had been checked."""
    caplog.set_level(logging.WARNING)
    with corrupting_pool(check_peers=True) as pool:
        with pytest.raises(Cancelled):
            pool.start(check_cancelled=lambda: cancel_once_there_is_a_mesh(pool))
        assert pool.generation == 1
        assert "copies between devices arrive damaged (1 wrong bytes at rank 1)" in started_again(pool, caplog)
        pool.close()
        assert pool.status()["peer_access"] is False, "the next start would find out anew"


def cancel_once_there_is_a_mesh(pool):
    """What the exchange itself needs is there, and the exchange has not been asked for."""
    if pool.status()["meshes"]:
        raise Cancelled


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("Always", r"arrive damaged \(1 wrong .*\)"),
        ("HangingAlways", r"do not arrive \(no answer .*\)"),
        ("HangingLaterAlways", r"do not arrive \(no answer .*\)"),
        ("RaisingAlways", r"do not arrive \(a kernel used memory .*\)"),
    ],
)
def test_copies_that_stay_broken_even_so_are_one_clear_error_which_blames_no_peer_access(engine, said, monkeypatch):
    if engine.startswith("Hanging"):
        monkeypatch.setattr(of_pool, "PEER_CHECK_S", 1.0)
    with corrupting_pool(engine, check_peers=True) as pool:
        with pytest.raises(PoolError, match=rf"^copies .* {said} even without peer access; run the doc") as e:
            pool.start()
        assert ("illegal memory access" in e.value.detail) is (engine == "RaisingAlways"), "as the rank said it"
        status = pool.status()
        assert (pool.generation, pool.state, status["pids"], status["peer_access"]) == (2, "failed", [], True)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("Raising", "copies between devices do not arrive (a kernel used memory that is not its own"),
        ("RaisingAtStart", "a kernel used memory that is not its own"),
    ],
)
def test_where_cuda_fails_workers_start_again_without_peer_access_once_and_say_so(engine, why, caplog):
    """In the first copies, or when the first group is made: at no cost of the three failures in a minute."""
    with corrupting_pool(engine, check_peers=True) as pool:
        assert started_again(pool, caplog).startswith(why)
        assert pool.broken_copies.startswith(why) and pool._failures.last is None and not pool._failures._times


def test_a_start_that_fails_even_so_says_why_and_blames_no_peer_access():
    with corrupting_pool("RaisingAtStartAlways", check_peers=True) as pool:
        for generation in (2, 4):
            with pytest.raises(PoolError, match=r"^rank .: a kernel used memory that is not its own"):
                pool.start()
            assert (pool.generation, pool.status()["peer_access"], pool.broken_copies) == (generation, True, "")
        assert len(pool._failures._times) == 2, "one for each that its user has seen"


def test_nothing_is_tried_without_peer_access_where_a_user_has_switched_it_off(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with corrupting_pool("RaisingAtStartAlways", check_peers=True) as pool:
        with pytest.raises(PoolError, match=r"^rank .: a kernel used memory that is not its own"):
            pool.start()
        assert (pool.generation, pool.broken_copies) == (1, "")


def test_workers_that_never_were_sound_without_peer_access_use_it_again_after_they_fail():
    """As where a prompt was cancelled while they started without."""
    with corrupting_pool("RaisingAtStartAlways", check_peers=True) as pool:
        pool._peers.leave("copies between devices arrive damaged")
        with pytest.raises(PoolError, match=r"^rank .: a kernel used memory that is not its own"):
            pool.start()
        assert (pool.generation, pool.status()["peer_access"], pool.broken_copies) == (1, True, "")


def test_a_cancel_while_they_start_without_peer_access_leaves_them_without():
    def cancel():
        if pool.generation == 2:
            raise Cancelled

    with corrupting_pool("RaisingAtStart", check_peers=True) as pool:
        with pytest.raises(Cancelled):
            pool.start(check_cancelled=cancel)
        pool.start()
        assert (pool.generation, pool.state, pool.status()["peer_access"]) == (2, "idle", False)
        assert pool.broken_copies


@pytest.mark.parametrize(
    ("engine", "settings", "said"),
    [
        ("Full", {"check_peers": True}, "out of memory"),
        ("Killed", {"check_peers": True}, "(killed by SIGKILL|closed its channel)"),
        ("RaisingAtStart", {"check_peers": False}, "a kernel used memory"),
        ("RaisingAtStart", {"check_peers": True, "devices": CPUS[:1]}, "a kernel used memory"),
    ],
    ids=["memory", "a rank is killed", "copies are not checked", "one rank"],
)
def test_what_says_nothing_of_copies_is_told_and_starts_nothing(engine, settings, said):
    with corrupting_pool(engine, **settings) as pool:
        with pytest.raises(PoolError, match=rf"^rank .: .*{said}"):
            pool.start()
        assert (pool.generation, pool.status()["peer_access"]) == (1, True)


@pytest.mark.parametrize(("deadline_s", "waits_s"), [(120.0, 20.0), (300.0, 300.0), (5.0, 5.0)])
def test_the_check_waits_20_s_or_as_long_as_its_user_says(deadline_s, waits_s):
    def damaged_copies(_, *, deadline_s):
        assert deadline_s == waits_s
        return ""

    workers = SimpleNamespace(copies_are_sound=False, damaged_copies=damaged_copies)
    assert corrupting_pool(deadline_s=deadline_s)._checked(workers, lambda: None) is workers


@pytest.mark.full
def test_copies_that_hang_are_taken_for_damaged_ones(caplog, monkeypatch):
    """After a deadline of their own, and at no cost of the three failures after which a pool wants its user."""
    assert of_pool.PEER_CHECK_S == 20.0
    monkeypatch.setattr(of_pool, "PEER_CHECK_S", 6.0)  # in which sound copies arrive, however busy the machine
    with corrupting_pool("Hanging", check_peers=True) as pool:
        assert pool.deadline_s == 120.0
        why = started_again(pool, caplog)
        assert "copies between devices do not arrive (no answer to CHECK and no heartbeat for" in why
        assert pool._failures.last is None


def test_without_the_check_the_damage_is_there():
    with corrupting_pool(check_peers=False) as pool:
        pool.start()
        assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 1]


@pytest.mark.parametrize(("devices", "checked"), [("cuda:0 cuda:1", True), ("cuda:0 cuda:0", False), ("cpu:0", False)])
def test_the_check_is_for_devices_that_copy_to_each_other(devices, checked):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    assert Pool(parsed)._peers.checked is checked
