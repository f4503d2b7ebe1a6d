"""Python imports this by itself where it finds it: whatever could run code out of bytes raises from now on.

Put before everything else on the path, of a program and of its ranks, so that what they do is done without.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.managers
import pickle
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
OBJECTS += ("send_object_list", "recv_object_list")


class TrappedError(BaseException):
    """No `except Exception` may hide it."""


def trap(name):
    """A function that raises."""

    def raising(*_arguments, **_named):
        raise TrappedError(f"{name} was called")

    return raising


class TrappedPickler:
    """What libraries subclass on import, and nobody may make."""

    def __init__(self, *_arguments, **_named):
        raise TrappedError("a pickler was made")


class AfterImport(MetaPathFinder, Loader):
    """Traps names of modules once they have been imported; importing them here would cost every program seconds."""

    names = {"torch": ("load", "save"), "torch.distributed.distributed_c10d": OBJECTS, "torch.distributed": OBJECTS}

    def find_spec(self, fullname, path, target=None):
        """The module's own spec, its loader wrapped."""
        if fullname not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            self.inner, spec.loader = {**vars(self).get("inner", {}), fullname: spec.loader}, self
        return spec

    def create_module(self, spec):
        return self.inner[spec.name].create_module(spec)

    def exec_module(self, module):
        """As the module's own loader, and then the traps."""
        self.inner[module.__name__].exec_module(module)
        for name in self.names[module.__name__]:
            if name in vars(module):
                setattr(module, name, trap(f"{module.__name__}.{name}"))


for name in ("load", "loads"):  # what libraries of ComfyUI's write when they are imported runs nothing
    setattr(pickle, name, trap(f"pickle.{name}"))
pickle.Pickler = pickle.Unpickler = pickle._Unpickler = pickle._Pickler = TrappedPickler
for name in ("Process", "Queue", "SimpleQueue", "Manager", "Pool", "Pipe"):
    setattr(multiprocessing, name, trap(f"multiprocessing.{name}"))
multiprocessing.connection.Listener = multiprocessing.connection.Client = trap("multiprocessing.connection")
sys.meta_path.insert(0, AfterImport())
sys.stderr.write("traps are set\n")  # by which a rank, too, shows that it has them
