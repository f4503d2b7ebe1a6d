"""What ranks take from their surroundings: modules, threads, an environment that is written out; a backend."""

import os
from pathlib import Path

import pytest

from parallel_runtime.devices import Device
from parallel_runtime.pool.process import RankSettings, rank_environment
from pool.echo_pool import HERE, run_step

ROOT = Path(HERE).parents[1]


def test_a_rank_is_set_up_for_inference_and_imports_no_model_library(pool):
    about = run_step(pool, about=["torch", "diffusers", "transformers", "comfy", "multiprocessing.queues"]).ranks[1][
        "about"
    ]
    assert about["loaded"] == ["torch"]
    cpus = len(os.sched_getaffinity(0))
    assert (about["threads"], about["interop_threads"], about["grad"]) == (max(1, cpus // 2), 1, False)
    assert about["session"] == pool.status()["pids"][1]
    assert {"PYTHONPATH", "GLOO_SOCKET_IFNAME"} <= set(about["environment"])


def test_a_ranks_environment_is_written_out_not_inherited():
    ours = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": "/elsewhere",
        "TORCHINDUCTOR_CACHE_DIR": "/libraries",
    }
    settings = RankSettings(devices=(Device("cpu", 0),), threads=3, engine="a:B", python_path=("/more",))
    assert rank_environment(ours, settings) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": f"{ROOT}:/more",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "TORCHINDUCTOR_CACHE_DIR": "/libraries",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


@pytest.mark.parametrize(
    ("devices", "backend"),
    [("cpu:0 cpu:1", "gloo"), ("cuda:0 cuda:1", "nccl"), ("cuda:0 cuda:0", "gloo"), ("cuda:0 cpu:0", "gloo")],
)
def test_ranks_that_share_a_device_talk_over_gloo(devices, backend):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    assert RankSettings(devices=parsed, threads=1, engine="a:B").backend == backend
