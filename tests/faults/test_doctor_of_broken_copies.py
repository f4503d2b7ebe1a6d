"""The doctor where copies between devices are broken: it says that workers do without them, as the pool does."""

import pytest

from faults.test_corrupt_peer_copies import CPUS, corrupting_pool
from host.fetch import comfyui_path
from parallel_runtime.cli import doctor
from parallel_runtime.cli.terminal import SILENT
from parallel_runtime.pool import pool as of_pool


@pytest.mark.parametrize("engine", ["Corrupting", "Raising", pytest.param("Hanging", marks=pytest.mark.full)])
def test_the_doctor_says_that_it_works_without_peer_access_and_what_that_costs(engine, monkeypatch):
    """As the pool does; bytes and a small model are tried over the link that workers use."""

    def make_pool(_, *, threads_per_rank, **given):
        return corrupting_pool(engine, **{"check_peers": True, **given})

    if engine == "Hanging":
        monkeypatch.setattr(of_pool, "PEER_CHECK_S", 6.0)
    monkeypatch.setattr(doctor, "Pool", make_pool)
    found = {check.name: check for check in doctor._live_checks(CPUS, str(comfyui_path()), SILENT)}
    assert [(check.name, check.ok) for check in found.values()] == [
        ("workers", True),
        ("peer copies", False),
        ("byte pattern", True),
        ("parity", True),
    ]
    peers = found["peer copies"]
    assert not peers.needed and peers.seen.startswith("copies between devices ")
    assert "are slower" in peers.remedy and "NCCL_P2P_DISABLE=1" in peers.remedy
