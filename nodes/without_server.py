"""What commands ask of the nodes' own code, in a process with ComfyUI and without a server: the tries of a file.

The asking side is parallel_runtime/cli/tune.py. What runs is what runs in ComfyUI, so what is kept is found there.
Nothing of ComfyUI's is imported before `start`, so neither is what needs it.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..parallel_runtime.errors import PoolError
from ..parallel_runtime.models.hosted.reference import serve
from .host.contract.without_server import begin


class WithoutServer:
    """Answers questions about a file by the nodes' own code, in one ComfyUI without a server."""

    questions = ("start", "tune")
    tell: Callable[[str], None] = staticmethod(lambda _: None)

    def start(self, path: str, options: list[str], device: str, counting: bool = False) -> dict[str, Any]:
        """Import ComfyUI with its options."""
        begin(path, options, on_cpu=device == "cpu")
        return {}

    def tune(self, path: str, config: Mapping[str, Any], dtype: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Try plans of a file on such work, under SP Config's inputs: what `tuning.tune` answers. Raises `ValueError`
        for inputs, a file or a work that cannot be used, and where the workers fail under the plan that would run."""
        tuning = _module("host.proof.tuning")
        asked_for = tuning.TuningRequest(**asked)
        choice = _module("choice").choice_of(**config)
        self.tell("reading the model's file")
        patcher = _module("host.model.new_model").remote_patcher(path, dtype, choice)
        of = _module("host.proof.begin_tries").Tunable.of(patcher, patcher.shares_of_run())
        if of.why_not:
            raise ValueError(of.why_not)
        self.tell(f"starting {len(of.pooled.devices)} rank(s) and loading the model")
        try:
            patcher.load()
            return tuning.tune(of, asked_for, say=self.tell) | {"warnings": list(choice.selection.warnings)}
        except PoolError as error:
            raise ValueError(str(error)) from error
        finally:
            _module("host.model.pools").POOLS.close_all()


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


def main() -> None:
    """Answer until the other side goes."""
    serve(WithoutServer())
