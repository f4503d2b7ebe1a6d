"""Python imports this by itself where it finds it: torch gets the pretend device when it is imported.

A rank finds it through `python_path`, and nobody else has that folder on the path. The device must be there before the
worker sets it and joins the others, and so before any engine of a test could bring it.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder


class WithDevice(MetaPathFinder, Loader):
    """Finds torch as ever, and puts the device in when its module has been run."""

    def find_spec(self, fullname, path, target=None):
        """torch's own spec, its loader wrapped."""
        if fullname != "torch":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        """As the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """As the module's own loader, then the device."""
        self.loader.exec_module(module)
        sys.meta_path.remove(self)
        from pretend_cuda import device  # here: it imports torch

        device.install()


sys.meta_path.insert(0, WithDevice())
