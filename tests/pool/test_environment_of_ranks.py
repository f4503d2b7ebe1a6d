"""What ranks take from their surroundings: modules, threads, an environment that is written out; a backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_runtime.devices import Device
from parallel_runtime.process.environment import RankSettings, rank_environment
from pool.echo_pool import HERE, make_pool, run_step

ROOT = Path(HERE).parents[1]
LIBRARIES = ["torch", "diffusers", "transformers", "comfy", "multiprocessing.queues"]
ATTENTION = "yunchang flash_attn flash_attn_interface flashinfer aiter sageattention xfuser".split()


def test_a_rank_is_set_up_for_inference_and_its_engine_imports_no_library_and_changes_no_environment(pool_of, tmp_path):
    """No model library, and no attention package: some ask the device when they are imported, set variables of
    compilers, or fail in other ways than an ImportError.
    """
    pool, paths = pool_of(1, threads_per_rank=3), [tmp_path / "before", tmp_path / "after"]
    first, last = (["write_about", str(path), *LIBRARIES, *ATTENTION] for path in paths)
    run_step(pool, faults={0: [first, ["import_module", "parallel_runtime.worker.engine"], last]})
    before, about = (json.loads(path.read_text()) for path in paths)
    assert about["loaded"] == ["torch"]
    assert about["environment"] == before["environment"]
    assert (about["threads"], about["interop_threads"], about["grad"]) == (3, 1, False)
    assert about["session"] == pool.status()["pids"][0]
    assert {"PYTHONPATH", "GLOO_SOCKET_IFNAME"} <= set(about["environment"])


def test_ranks_share_the_cpus():
    assert make_pool(2).threads_per_rank == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_ranks_environment_is_written_out_not_inherited():
    ours = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": "/elsewhere::relative:/more packages",
        "TORCHINDUCTOR_CACHE_DIR": "/libraries",
    }
    settings = RankSettings(devices=(Device("cpu", 0),), threads=3, engine="a:B", python_path=("/more",))
    assert rank_environment(ours, settings) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": f"{ROOT}:/more:/elsewhere:/more packages",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "3",
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "NCCL_OOB_NET_IFNAME": "=lo",
        "NCCL_RAS_ADDR": "localhost:28028",
        "TORCHINDUCTOR_CACHE_DIR": "/libraries",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


def test_what_a_user_sets_for_gpus_reaches_the_ranks_but_for_where_nccls_listen():
    """Some change a result; of those, ComfyUI's main program sets some itself, for --deterministic or a kind of GPU."""
    theirs = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1",
        "COMFYUI_ENABLE_MIOPEN": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "TORCH_NCCL_HIGH_PRIORITY": "0",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MODULE_LOADING": "EAGER",
        **dict.fromkeys(("GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "1,0"),
        "HSA_OVERRIDE_GFX_VERSION": "10.3.0",
        "HSA_OVERRIDE_GFX_VERSION_1": "11.0.0",
        "HSA_ENABLE_SDMA": "0",
        "HSA_FORCE_FINE_GRAIN_PCIE": "1",
        "HIP_FORCE_DEV_KERNARG": "1",
        "MIOPEN_FIND_MODE": "FAST",
        "RCCL_MSCCL_ENABLE": "0",
        "ROCBLAS_USE_HIPBLASLT": "0",
        "HIPBLASLT_TENSILE_LIBPATH": "/libraries",
    }
    listen = {"NCCL_COMM_ID": "10.0.0.1:1", "NCCL_RAS_ADDR": "0.0.0.0:28028", "NCCL_OOB_NET_IFNAME": "eth0"}
    ours = theirs | listen | {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "0", "LESS": "-R"}
    settings = RankSettings(devices=(Device("cuda", 0), Device("cuda", 1)), threads=1, engine="a:B", peer_access=False)
    found = rank_environment(ours, settings)
    assert {name: found.get(name) for name in theirs} == theirs
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_P2P_DISABLE"]) == ("=lo", "1"), "what we set is ours"
    assert (found["NCCL_OOB_NET_IFNAME"], found["NCCL_RAS_ADDR"]) == ("=lo", "localhost:28028")
    assert not {"NCCL_COMM_ID", "LESS"} & found.keys()


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [
        ("expandable_segments:True", "expandable_segments:True"),
        ("backend:cudaMallocAsync", None),  # as ComfyUI sets it by itself
        ("expandable_segments:True,backend:cudaMallocAsync", "expandable_segments:True"),  # and appends it
        (" backend : native , max_split_size_mb: 512 ", "max_split_size_mb:512"),
        (
            "roundup_power2_divisions:[256:1, 512:2,>:4],backend:cudaMallocAsync,garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8",
        ),
        (",backend:cudaMallocAsync", None),
        ("  ", None),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_settings_of_torchs_allocator_reach_the_ranks_without_the_backend(name, theirs, kept):
    settings = RankSettings(devices=(Device("cuda", 0),), threads=1, engine="a:B")
    assert rank_environment({name: theirs}, settings).get(name) == kept


@pytest.mark.parametrize(
    ("version", "recorded", "held"),
    [
        ("2.6.0+cu124", "TORCH_NCCL_TRACE_BUFFER_SIZE", "1"),
        ("2.8.1", "TORCH_NCCL_TRACE_BUFFER_SIZE", None),
        ("2.13.0a0+git12", "TORCH_FR_BUFFER_SIZE", None),
    ],
)
def test_no_stack_is_noted_of_exchanges_unless_a_user_says_so_and_no_memory_is_kept_behind_them(
    monkeypatch, version: str, recorded: str, held: str | None
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    pair = tuple(Device("cuda", index) for index in range(2))
    sizes = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
    for name in (None, *sizes):
        ours = {} if name is None else {name: "7"}
        found = rank_environment(ours, RankSettings(devices=pair, threads=1, engine="e"))
        assert {each: found[each] for each in sizes if each in found} == (ours or {recorded: "0"})
        assert found.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == held
    on_cpu = tuple(Device("cpu", index) for index in range(2))
    assert "TORCH_" not in " ".join(rank_environment({}, RankSettings(devices=on_cpu, threads=1, engine="e")))


def test_no_launch_waits_for_its_kernel_where_ranks_exchange_over_nccl() -> None:
    ours = {"CUDA_LAUNCH_BLOCKING": "1"}
    for devices, kept in (
        ((("cuda", 0), ("cuda", 1)), False),
        ((("cuda", 0),), True),
        ((("cuda", 0), ("cuda", 0)), True),
    ):
        settings = RankSettings(devices=tuple(Device(*each) for each in devices), threads=1, engine="e")
        assert ("CUDA_LAUNCH_BLOCKING" in rank_environment(ours, settings)) == kept, devices


def test_ranks_on_nccl_exchange_at_high_priority_and_are_watched_by_their_parent_alone():
    on_gpus = RankSettings(devices=(Device("cuda", 0), Device("cuda", 1)), threads=1, engine="a:B")
    found = rank_environment({}, on_gpus)
    assert found["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert (found["TORCH_NCCL_ENABLE_MONITORING"], found["TORCH_NCCL_RETHROW_CUDA_ERRORS"]) == ("0", "0")
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    read_by_torch = (headers / "ProcessGroupNCCL.hpp").read_text(encoding="utf-8")
    named = {name for name in found if name.startswith("TORCH_NCCL_")} - {"TORCH_NCCL_USE_COMM_NONBLOCKING"}
    assert all(f'"{name}"' in read_by_torch for name in named), "torch reads no such"


@pytest.mark.parametrize(("name", "other"), [("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"), ("NCCL_GRAPH_REGISTER", "1")])
def test_what_hangs_in_some_versions_of_nccl_is_off_unless_a_user_says_so(name: str, other: str) -> None:
    """torch reads the first where it makes a group (ProcessGroupNCCL::useNonblocking, in no header)."""
    pair = tuple(Device("cuda", index) for index in range(2))
    for ours, value in (({}, "0"), ({name: other}, other)):
        assert rank_environment(ours, RankSettings(devices=pair, threads=1, engine="e"))[name] == value
    on_cpu = tuple(Device("cpu", index) for index in range(2))
    assert name not in rank_environment({}, RankSettings(devices=on_cpu, threads=1, engine="e"))


def test_packages_of_a_users_own_base_are_found() -> None:
    ours = {"PYTHONUSERBASE": "/packages"}
    found = rank_environment(ours, RankSettings(devices=(Device("cuda", 0),), threads=1, engine="e"))
    assert found.items() >= ours.items()


def test_large_tensors_of_a_rank_lie_in_huge_pages_unless_the_user_says_otherwise():
    on_cpus = RankSettings(devices=(Device("cpu", 0),), threads=1, engine="a:B")
    assert rank_environment({"THP_MEM_ALLOC_ENABLE": "0"}, on_cpus)["THP_MEM_ALLOC_ENABLE"] == "0"
    read_by_torch = (Path(torch.__file__).parent / "lib/libc10.so").read_bytes()
    assert b"THP_MEM_ALLOC_ENABLE" in read_by_torch, "torch reads no such"


@pytest.mark.parametrize(
    ("devices", "backend", "over_nccl"),
    [
        ("cpu:0 cpu:1", "gloo", False),
        ("cuda:0 cuda:1", "nccl", True),
        ("cuda:0", "nccl", False),  # which exchanges nothing
        ("cuda:0 cuda:0", "gloo", False),
        ("cuda:0 cpu:0", "gloo", False),
    ],
)
def test_ranks_exchange_over_nccl_where_each_has_a_gpu_of_its_own_and_else_over_gloo(devices, backend, over_nccl):
    parsed = tuple(Device(kind, int(index)) for kind, index in (name.split(":") for name in devices.split()))
    settings = RankSettings(devices=parsed, threads=1, engine="a:B")
    assert (settings.backend, settings.over_nccl) == (backend, over_nccl)


def test_a_rank_searches_the_folders_that_its_parent_found_by_a_relative_name(tmp_path):
    """Never the parent's current folder, which an empty name and a dot would be, nor one that it does not search."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from parallel_runtime.devices import Device\n"
        "from parallel_runtime.process.environment import RankSettings, rank_environment\n"
        "ours = dict(os.environ, PYTHONPATH=os.environ['PYTHONPATH'] + ':unsearched')\n"
        "found = rank_environment(ours, RankSettings(devices=(Device('cpu', 0),), threads=1, engine='a:B'))\n"
        "print(found['PYTHONPATH'], found.get('PYTHONNOUSERSITE'))"
    )
    (tmp_path / "packages").mkdir()

    def path_of(*flags):
        command = [sys.executable, *flags, "-c", code, str(ROOT)]
        environment = {"PYTHONPATH": "packages::.:/absolute"}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert path_of() == f"{ROOT}:{tmp_path}/packages:/absolute None\n"
    assert path_of("-s") == f"{ROOT}:{tmp_path}/packages:/absolute 1\n", (
        "nor a user's own packages where ComfyUI has none"
    )
    assert path_of("-E", "-s") == f"{ROOT} 1\n", "nor any that ComfyUI was told to leave"
