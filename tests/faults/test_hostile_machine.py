"""A real run where little is to be had and whatever could let somebody in is trapped: it is right, and nobody gets in.

One run of the real engine for all of it, since its ranks import ComfyUI's modules each; what it saw of itself is asked
test by test. What its sources name: test_nobody_gets_in.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from faults.namespaces import namespaces
from faults.programs import ROOT, run_program
from faults.soak_models import write_model
from faults.sockets import LISTENING, LOOPBACK
from host.fetch import comfyui_path

TRAPPED = ROOT / "tests" / "faults" / "trapped"
# A file system in which nobody can make a file, not even root, whom the mode of a folder does not keep out.
READ_ONLY = "/proc/fs"
PLANS = ("ulysses=2", "ring=2", "ulysses=2,weights=sharded", "pipefusion=2")  # with all kinds of groups
OUTSIDE = "024DA8C0"  # 192.168.77.2, as the kernel writes it
HOSTS = "127.0.0.1 localhost\n192.168.77.2 lan-host\n"
# Namespaces give the machine a name in a network, a models folder that is read-only and no shared memory.
PROGRAM = """
    import fcntl, json, os, pickle, resource, socket, struct, subprocess, torch
    import torch.distributed as dist
    from faults.soak_models import lora
    from faults.sockets import sockets_of
    from host.tiny_hosted import call, spec_of
    from parallel_runtime.devices import parse_devices
    from parallel_runtime.plan import ParallelPlan
    from parallel_runtime.process import rank_process
    from parallel_runtime.pool.pool import Pool

    def network(name, address):
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        inet = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(probe, 0x8916, struct.pack("<16s16s8x", name, inet))  # SIOCSIFADDR
        fcntl.ioctl(probe, 0x8914, struct.pack("<16sH22x", name, 0x41))  # SIOCSIFFLAGS: up and running

    def refuses_files(folder):
        try:
            open(f"{folder}/file", "w")
        except OSError:
            return True

    def springs(trapped):
        try:
            trapped(b"")
        except BaseException as error:
            return str(error)

    folders = [os.environ["HOME"], os.environ["TMPDIR"]]
    if INSIDE:
        network(b"lo", "127.0.0.1")
        network(b"lo:1", "192.168.77.2")
        socket.sethostname("lan-host")
        for mounted in ((HOSTS, "/etc/hosts"), ("-o", "ro", MODELS, MODELS), (folders[0], "/dev/shm")):
            subprocess.run(["mount", "--bind", *mounted], check=True)
        folders += [MODELS, "/dev/shm"]
    if not OURS:
        whole = rank_process.rank_environment
        rank_process.rank_environment = lambda *given: {
            name: value for name, value in whole(*given).items() if "SOCKET_IFNAME" not in name
        }
    functions = (pickle.loads, torch.load, dist.broadcast_object_list, dist.all_gather_object)
    said = {"springs": list(map(springs, functions)), "refused": list(map(refuses_files, folders)), "finite": []}
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(150)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    spec = spec_of(MODELS + "/model.safetensors")
    settings = {"threads_per_rank": 1, "segment_bytes": 1 << 16, "check_peers": True}
    with Pool(parse_devices("cpu:2").devices, python_path=(TRAPS,), **settings) as pool:
        for plan in PLANS:
            done = pool.run(spec, ParallelPlan.parse(plan), [call()], deltas=lora("one", seed=1, strength=0.8))
            said["finite"].append(bool(done.outs[0].isfinite().all()))
        ranks = pool._workers.generation.ranks
        said["sockets"] = [sockets_of(pid) for pid in (os.getpid(), *(rank.pid for rank in ranks))]
        said["printed"] = [rank.output.text() for rank in ranks]
    print(json.dumps(said))
"""


def hostile_run(folder: Path, inside: Sequence[str], *, ours: bool = True) -> dict[str, Any]:
    """What the program says; without `ours`, ranks listen where gloo does by itself."""
    (folder / "hosts").write_text(HOSTS)
    (folder / "models").mkdir()
    write_model(folder / "models" / "model.safetensors", seed=1)
    values = {"INSIDE": bool(inside), "OURS": ours, "PLANS": PLANS, "TRAPS": str(TRAPPED)}
    program = PROGRAM
    for name, value in {**values, "HOSTS": str(folder / "hosts"), "MODELS": str(folder / "models")}.items():
        program = program.replace(name, repr(value))
    around = {"HOME": READ_ONLY, "TMPDIR": READ_ONLY, "COMFYUI_PATH": str(comfyui_path())}
    around["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # made when ComfyUI imports torch's compiler, or that fails
    (line,) = run_program(program, inside=inside, PYTHONPATH=f"{TRAPPED}:{ROOT}:{ROOT / 'tests'}", **around)
    return json.loads(line)


def listening(run: dict[str, Any]) -> set[str]:
    """The addresses at which its ranks listen."""
    return {address for rank in run["sockets"][1:] for address, state in rank if state == LISTENING}


@pytest.fixture(scope="module")
def inside() -> list[str]:
    """The command that runs another in namespaces; nothing where there are none."""
    return namespaces("--mount", "--uts", "--net")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, inside: list[str]) -> dict[str, Any]:
    return hostile_run(tmp_path_factory.mktemp("hostile"), inside)


def test_a_pool_works_with_256_descriptors_a_read_only_home_a_read_only_models_folder_and_no_shm(
    run: dict[str, Any], inside: list[str]
) -> None:
    """ComfyUI itself takes about a hundred."""
    assert run["refused"] == [True] * (4 if inside else 2)
    assert run["finite"] == [True] * len(PLANS)


def test_a_run_with_all_of_that_booby_trapped_is_right(run: dict[str, Any]) -> None:
    """Start, check, load, exchange, change weights and step, in the caller and in every rank."""
    distributed = [f"torch.distributed.{name}" for name in ("broadcast_object_list", "all_gather_object")]
    assert run["springs"] == [f"{name} was called" for name in ("pickle.loads", "torch.load", *distributed)]
    assert ["traps are set" in text for text in run["printed"]] == [True, True]
    assert run["finite"] == [True] * len(PLANS)


def test_a_machine_with_a_name_in_the_network_listens_on_loopback_alone(run: dict[str, Any]) -> None:
    own, *ranks = run["sockets"]
    assert listening(run), "gloo listens somewhere, or this test looks in the wrong place"
    assert {address for rank in ranks for address, _ in rank} <= LOOPBACK
    assert own == []


@pytest.mark.full
def test_without_our_settings_it_listens_where_its_name_leads(tmp_path: Path, inside: list[str]) -> None:
    """The negative control: nothing would have been reachable, so the other half would show nothing."""
    assert (OUTSIDE in listening(hostile_run(tmp_path, inside, ours=False))) == bool(inside)
