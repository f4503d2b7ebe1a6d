"""No bytes that arrive can run code: no source of the pack names pickle or its like, nor needs assertions.

That a run does without, and that nothing listens beyond loopback: test_hostile_machine.py.
"""

import ast
import functools

import pytest

from faults.programs import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "joblib"}
# Names whatever they hang on: an attribute of torch, of torch.distributed, of numpy.
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = {"allow_pickle"}
FORBIDDEN_NAMES |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}
FORBIDDEN_NAMES |= {"all_gather_object", "gather_object", "TCPStore", "_share_memory", "reductions"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "torch.hub", "os.system", "os.popen"}
LAST_WORDS = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS} | FORBIDDEN_NAMES

# Where ranks of several machines meet: a store on a socket that was bound to one address, in which nothing is pickled.
AT_THE_STORE = tuple(f"parallel_runtime/{name}.py" for name in ("machines/launch", "machines/relay", "worker/start"))


def forbidden(tree):
    """What a source does that may run code out of bytes, a line each."""
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for name in [module, *names, *(f"{module}.{name}" for name in names)] if names else ():
            if {name.split(".")[0], name.split(".")[-1]} & FORBIDDEN_MODULES or "multiprocessing" in name:
                found.append(f"line {node.lineno}: imports {name}")
            if name.split(".")[-1] in FORBIDDEN_NAMES or name in FORBIDDEN_CALLS:
                found.append(f"line {node.lineno}: imports {name}")
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_BUILTINS:
            found.append(f"line {node.lineno}: {node.id}")
        last_word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if last_word in LAST_WORDS:
            text = ast.unparse(node)
            if text in FORBIDDEN_CALLS or last_word in FORBIDDEN_NAMES:
                found.append(f"line {node.lineno}: {text}")
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_NAMES | {"shell"}:
            found.append(f"line {node.value.lineno}: {node.arg}=")
    return found


@functools.cache
def sources():
    """The pack's own, parsed, by name."""
    paths = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_runtime").rglob("*.py")]
    assert len(paths) > 60
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


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
        for node in ast.walk(source)
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
    assert forbidden(ast.parse(source))
