"""What the pool tells further machines at a start, and what is left where a start comes to nothing."""

import gc
import os
import re
import select
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch.distributed as dist
from descriptors import open_descriptors

from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.machines import joined, relay
from parallel_runtime.machines.launch import Start, settings_of
from parallel_runtime.machines.machine import Lost, Machine
from parallel_runtime.machines.messages import Launch, StartGeneration
from parallel_runtime.pool.remote_ranks import RemoteRanks
from parallel_runtime.process.environment import RankSettings, interface_of, rank_environment

SETTINGS = RankSettings(devices=parse_devices("cpu:1").devices, threads=1, engine="parallel_runtime.worker.engine")


class LostAtStart:
    """As `Machine`; lost as soon as it is told to start something."""

    name, here, address, devices = "shelf", "127.0.0.1", "127.0.0.1:7", ("cpu:0", "cpu:1")

    def __init__(self) -> None:
        self.lost: Lost | None = None
        self.told: list[StartGeneration] = []

    def start(self, start: StartGeneration) -> None:
        self.told.append(start)
        self.lost = Lost("its cable was pulled")
        raise PoolError("machine shelf is lost", remedy="mend it")

    def kill(self, generation: int) -> None:
        pass

    def wait_ended(self, generation: int, deadline_s: float) -> bool:
        return True


def start_in_vain(machine: LostAtStart, settings: RankSettings = SETTINGS) -> None:
    remote = RemoteRanks([cast(Machine, machine)], settings)
    with pytest.raises(PoolError, match="machine shelf is lost"):
        remote.start(remote.meet(settings), generation=1, deadline_s=5.0)
    remote.kill()
    assert remote.reap() == []


def test_a_machine_that_is_lost_at_the_start_leaves_no_descriptor() -> None:
    start_in_vain(LostAtStart())
    gc.collect()
    gc.disable()  # a descriptor that only the collector closes is one too many
    try:
        before = open_descriptors()
        start_in_vain(LostAtStart())
        assert not open_descriptors() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("peer_access", [True, False])
def test_ranks_elsewhere_copy_between_gpus_as_those_here(peer_access: bool) -> None:
    machine, here = LostAtStart(), replace(SETTINGS, peer_access=peer_access)
    start_in_vain(machine, here)
    (told,) = machine.told
    there = settings_of(Launch(told, "shelf", "127.0.0.1"))
    assert (there.peer_access, "NCCL_P2P_DISABLE" in rank_environment({}, there)) == (peer_access, not peer_access)


@pytest.mark.parametrize(("asked", "cpus", "given"), [(8, 8, 4), (2, 8, 2), (8, 1, 1)])
def test_ranks_have_no_more_threads_than_their_machine_has_cpus_for_them(
    monkeypatch: pytest.MonkeyPatch, asked: int, cpus: int, given: int
) -> None:
    machine = LostAtStart()  # of two devices
    start_in_vain(machine, replace(SETTINGS, threads=asked))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    settings = settings_of(Launch(machine.told[0], "shelf", "127.0.0.1"))
    start = Start(machine.told[0], settings)
    assert (settings.threads, [f"--threads={given}" in each for each in start._arguments]) == (given, [True] * 2)
    assert len(set(start._lifelines)) == 2 and not {*start._lifelines} & {*start._theirs}, "a rank dies with its one"
    for fd in (*start._lifelines, *start._theirs):
        os.close(fd)


def test_ranks_listen_on_no_other_address_than_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo and NCCL are told an interface, and take its first address."""
    families = {"10.0.0.5": socket.AF_INET, "203.0.113.5": socket.AF_INET, "fd00::5": socket.AF_INET6}
    public = {"9.9.9.9": socket.AF_INET, "fd00::7": socket.AF_INET6}
    there = {
        "eth0": [SimpleNamespace(family=psutil.AF_LINK, address="02:00:00:00:00:01")],
        "wg0": [SimpleNamespace(family=socket.AF_INET6, address="fd00::9")],
    }
    there["eth0"] += [SimpleNamespace(family=family, address=address) for address, family in families.items()]
    there["eth1"] = [SimpleNamespace(family=family, address=address) for address, family in public.items()]
    there["eth0:1"] = [SimpleNamespace(family=socket.AF_INET, address="10.0.0.6")]  # a label, which NCCL reads as eth0
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    assert [interface_of(address) for address in ("10.0.0.5", "fd00::9", "fd00::5")] == ["eth0", "wg0", "eth0"]
    refused = {"203.0.113.5": "eth0 10.0.0.5", "10.0.0.6": "eth0:1 10.0.0.5", "fd00::7": "eth1 9.9.9.9"}
    for address, said in refused.items():
        name, first = said.split()
        with pytest.raises(
            ValueError, match=f"^{name} has the address {first} before {address}, .*; use {first} between"
        ):
            interface_of(address)
    machine = LostAtStart()
    machine.here = "203.0.113.5"
    with pytest.raises(PoolError, match="^eth0 has the address 10.0.0.5 before .*; use 10.0.0.5 between"):
        RemoteRanks([cast(Machine, machine)], SETTINGS).meet(SETTINGS)


def test_a_machine_that_is_reached_elsewhere_than_where_it_is_starts_no_ranks() -> None:
    machine = LostAtStart()
    machine.address = "172.17.0.1:7"
    start_in_vain(machine)
    with pytest.raises(ValueError, match="^ComfyUI sees this machine at 172.17.0.1, which is 127.0.0.1 here"):
        settings_of(Launch(machine.told[0], "shelf", "127.0.0.1"))


def test_what_a_joined_machines_nccl_file_would_have_ranks_meet_by_is_refused_there_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_COMM_ID=1.2.3.4:5\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    machine = LostAtStart()
    start_in_vain(machine)
    on_cuda = replace(machine.told[0], backend="nccl", devices=("cuda:0",))
    with pytest.raises(
        ValueError, match="^NCCL_CONF_FILE sets NCCL_COMM_ID, .* than beside ComfyUI; take that line out of the file"
    ):
        settings_of(Launch(on_cuda, "shelf", "127.0.0.1"))
    file.write_text("NCCL_DEBUG=INFO\n")
    assert settings_of(Launch(on_cuda, "shelf", "127.0.0.1")).backend == "nccl"


@pytest.mark.slow
def test_a_machine_that_cannot_reach_where_all_meet_says_so_and_not_only_that_it_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    start = StartGeneration(1, "127.0.0.1", port, 2, 1, ("cpu:0",), 1, 600.0, "127.0.0.1", engine=SETTINGS.engine)
    launcher = joined._Process(Launch(start, "shelf", "127.0.0.1"))
    try:
        assert select.select([launcher.pidfd], [], [], 120)[0], "else it would try for ten minutes"
        assert (launcher.end(others=set()), launcher.code) == ([], 1)
        said = (
            f"ValueError: 127.0.0.1:{port} beside ComfyUI, where workers meet, does not answer (Connection refused); "
        )
        assert launcher.last_lines().splitlines()[-1].startswith(said)
    finally:
        launcher.close()


@pytest.mark.slow
def test_a_rank_that_fails_before_comfyuis_side_hears_it_is_the_launchers_last_line() -> None:
    """Where another machine's launcher is late: those of all machines meet before anything is passed on."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay.assign_ranks(store, 1, 1, world_size=2)
    start = StartGeneration(
        generation=1,
        master_addr="127.0.0.1",
        master_port=store.port,
        world_size=2,
        first_rank=1,
        devices=("cuda:99",),
        threads=1,
        deadline_s=60.0,
        engine=SETTINGS.engine,
        seen_as="127.0.0.1",
    )
    others = {child.pid for child in psutil.Process().children()}
    launcher = joined._Process(Launch(start, "shelf", "127.0.0.1"))
    try:
        assert select.select([launcher.pidfd], [], [], 120)[0]
        assert (launcher.end(others=others), launcher.code) == ([], 1)
        assert re.fullmatch(r"rank 1: \w*Error: .+", launcher.last_lines().splitlines()[-1])
    finally:
        launcher.close()
