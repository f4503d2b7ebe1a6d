"""What `make gpu-plans` changes so that ranks share one GPU, as far as it shows without one. Its runs need a GPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = """
import os
from gpu.real_cuda.sharing import share
share("nccl")
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.process import RankSettings, rank_environment
settings = RankSettings(devices=parse_devices("cuda:0,cuda:0", num_cuda=1).devices, threads=1, engine="a:B")
assert settings.backend == "nccl", settings.backend
print(rank_environment(os.environ, settings)["PYTHONPATH"])
"""


def run(*words: str, path: str) -> str:
    """What a fresh interpreter prints."""
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_two_ranks_of_one_gpu_are_hosts_of_their_own_for_nccl():
    path = run("-c", SHARED, path=f"{ROOT}:{ROOT / 'tests'}")
    ask = ("-c", "import os; print(os.environ.get('NCCL_HOSTID'))")
    hosts = [run(*ask, f"--rank={rank}", path=path) for rank in range(2)]
    assert hosts == ["host-of-rank=0", "host-of-rank=1"]
    assert run(*ask, path=path) == "None"
