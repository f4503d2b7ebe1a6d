"""Nothing of ours is reachable from outside, and no bytes that arrive can run code: no pickle anywhere on the path."""

import ast
import json
import os

import pytest
from pool.echo_pool import run_step

from faults.namespaces import namespaces
from faults.programs import ROOT, run_program
from faults.sockets import LISTENING, LOOPBACK, sockets_of

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "joblib"}
# Names whatever they hang on: an attribute of torch, of torch.distributed, of numpy.
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = {"allow_pickle"}
FORBIDDEN_NAMES |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}
FORBIDDEN_NAMES |= {"all_gather_object", "gather_object", "TCPStore", "_share_memory", "reductions"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "torch.hub", "os.system", "os.popen"}
TRAPPED = ROOT / "tests" / "faults" / "trapped"


def test_no_socket_of_ours_is_reachable_from_outside(pool):
    run_step(pool)
    ranks = [socket for pid in pool.status()["pids"] for socket in sockets_of(pid)]
    assert LISTENING in {state for _, state in ranks}, "gloo listens somewhere, or this test looks in the wrong place"
    assert {address for address, _ in ranks} <= LOOPBACK
    assert sockets_of(os.getpid()) == []


@pytest.mark.parametrize(
    "ours", [pytest.param(True, id="as it is"), pytest.param(False, id="without our settings", marks=pytest.mark.full)]
)
def test_a_machine_with_a_name_in_the_network_listens_on_loopback_alone(ours, tmp_path):
    """By itself gloo listens where the machine's name leads. `without our settings` is the negative control."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n192.168.77.2 lan-host\n")
    inside = namespaces("--mount", "--uts", "--net")
    program = """
        import fcntl, os, socket, struct, subprocess, sys
        from parallel_runtime.pool import process
        from faults.sockets import LISTENING, sockets_of
        from echo_pool import make_pool, run_step

        def network(name, address):
            probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            inet = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(probe, 0x8916, struct.pack("<16s16s8x", name, inet))  # SIOCSIFADDR
            fcntl.ioctl(probe, 0x8914, struct.pack("<16sH22x", name, 0x41))  # SIOCSIFFLAGS: up and running

        if INSIDE:
            network(b"lo", "127.0.0.1")
            network(b"lo:1", "192.168.77.2")
            socket.sethostname("lan-host")
            subprocess.run(["mount", "--bind", HOSTS, "/etc/hosts"], check=True)
        if not OURS:
            whole = process.rank_environment
            process.rank_environment = lambda *given: {
                name: value for name, value in whole(*given).items() if "SOCKET_IFNAME" not in name
            }
        with make_pool(2) as pool:
            run_step(pool)
            for pid in pool.status()["pids"]:
                print(*sorted({address for address, state in sockets_of(pid) if state == LISTENING}))
    """
    for name, value in {"INSIDE": bool(inside), "HOSTS": str(hosts), "OURS": ours}.items():
        program = program.replace(name, repr(value))
    listening = {address for line in run_program(program, inside=inside) for address in line.split()}
    if ours:
        assert listening
        assert listening <= LOOPBACK
    elif inside:
        assert "024DA8C0" in listening, "nothing would have been reachable, so the other half shows nothing"


# Where ranks of several machines meet: a store on a socket that was bound to one address, in which nothing is pickled.
AT_THE_STORE = tuple(f"parallel_runtime/{name}.py" for name in ("machines/launch", "machines/relay", "worker/start"))


def forbidden(source):
    """What a source does that may run code out of bytes, a line each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for name in [module, *names, *(f"{module}.{name}" for name in names)]:
            if {name.split(".")[0], name.split(".")[-1]} & FORBIDDEN_MODULES or "multiprocessing" in name:
                found.append(f"line {node.lineno}: imports {name}")
            if name.split(".")[-1] in FORBIDDEN_NAMES or name in FORBIDDEN_CALLS:
                found.append(f"line {node.lineno}: imports {name}")
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_BUILTINS:
            found.append(f"line {node.lineno}: {node.id}")
        if isinstance(node, (ast.Attribute, ast.Name)):
            text = ast.unparse(node)
            if text in FORBIDDEN_CALLS or text.split(".")[-1] in FORBIDDEN_NAMES:
                found.append(f"line {node.lineno}: {text}")
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_NAMES | {"shell"}:
            found.append(f"line {node.value.lineno}: {node.arg}=")
    return found


def sources():
    """The pack's own, by name."""
    paths = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_runtime").rglob("*.py")]
    assert len(paths) > 60
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_no_source_of_the_pack_names_what_runs_code_out_of_bytes():
    found = {path: forbidden(source) for path, source in sources().items()}
    for path in AT_THE_STORE:
        assert any(line.endswith(" dist.TCPStore") for line in found[path])
        found[path] = [line for line in found[path] if not line.endswith(" dist.TCPStore")]
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_source_of_the_pack_needs_assertions():
    """`python -O` takes them away, and what is under `__debug__`: what must hold of bytes is asked with an if."""
    found = [
        f"{path}:{node.lineno}"
        for path, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__")
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from torch import multiprocessing", "import torch.multiprocessing as mp", "eval('1')"),
        *("import torch\ntorch.load('x')", "from torch import load", "import numpy as np\nnp.load('x')"),
        *("import torch.distributed as dist\ndist.broadcast_object_list([])", "f(allow_pickle=True)", "g(shell=True)"),
        *("from torch.distributed import all_gather_object", "from multiprocessing.managers import SyncManager"),
    ],
)
def test_a_source_that_does_is_found(source):
    assert forbidden(source)


def test_a_run_with_all_of_that_booby_trapped_is_right(tmp_path):
    """Start, load, exchange, change weights and step, in the caller and in every rank."""
    program = """
        import pickle, sys, torch
        import torch.distributed as dist
        from pathlib import Path
        from faults.soak_models import lora, write_model
        from host.tiny_hosted import call
        from parallel_runtime.devices import Device
        from parallel_runtime.plan import ParallelPlan
        from parallel_runtime.pool.pool import Pool

        for trapped in (pickle.loads, torch.load, dist.broadcast_object_list, dist.all_gather_object):
            try:
                trapped(b"")
            except BaseException as error:
                print(error)
        spec = write_model(Path(FOLDER) / "model.safetensors", seed=1)
        with Pool((Device("cpu", 0), Device("cpu", 1)), python_path=(TRAPS,), check_peers=True) as pool:
            for plan in (ParallelPlan(ulysses=2), ParallelPlan(ring=2)):
                done = pool.run(spec, plan, [call()], deltas=lora("one", seed=1, strength=0.8))
                print(bool(done.outs[0].isfinite().all()))
    """
    program = program.replace("FOLDER", repr(str(tmp_path))).replace("TRAPS", repr(str(TRAPPED)))
    lines = run_program(program, PYTHONPATH=f"{TRAPPED}:{ROOT}:{ROOT / 'tests'}")
    traps = ["pickle.loads", "torch.load", "torch.distributed.broadcast_object_list"]
    traps += ["torch.distributed.all_gather_object"]
    assert lines == [*(f"{name} was called" for name in traps), "True", "True"]


def test_the_traps_are_set_in_a_rank_too(pool_of, tmp_path):
    pool = pool_of(1, python_path=(str(ROOT / "tests" / "pool"), str(TRAPPED)))
    run_step(pool, faults={0: [["write_about", str(tmp_path / "about"), "sitecustomize"]]})
    assert json.loads((tmp_path / "about").read_text())["loaded"] == ["sitecustomize"]
