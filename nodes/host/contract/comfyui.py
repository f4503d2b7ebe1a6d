"""ComfyUI's modules as this pack reaches them. A name that this ComfyUI lacks costs the feature that needs it alone.

Owns the one place at which ComfyUI is asked for what it has. What is asked for, what needs it and what becomes of a
missing name are lines of `parallel_runtime/models/hosted/contract.py`.
"""

import inspect
from types import ModuleType
from typing import Any, NoReturn

from ....parallel_runtime.models.hosted.contract_check import NOTHING, MissingInComfyUIError, find
from .version import said_of


class _Absent(type):
    """The class of what stands for a name that ComfyUI lacks."""

    __signature__ = inspect.Signature()

    def __getattr__(cls, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise MissingInComfyUIError(said_of(cls.__name__))


def absent(name: str) -> _Absent:
    """Stands for a name that ComfyUI lacks: nothing is an instance of it, and a call raises the contract's words."""
    return _Absent(name, (), {})


def is_absent(value: object) -> bool:
    """Whether this stands for a name that ComfyUI lacks."""
    return isinstance(value, _Absent)


class Part:
    """A module of ComfyUI's, or a class that holds names, looked at with each use; what it lacks is `absent`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inner: dict[str, Part] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in self._inner:
            return self._inner[name]
        if name.startswith("__") and name not in ("__file__", "__name__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}"
        found = find(path)
        if found is NOTHING:
            return absent(path)
        if isinstance(found, ModuleType):
            return self._inner.setdefault(name, Part(path))
        return found


comfy = Part("comfy")
comfy_api = Part("comfy_api")
comfy_execution = Part("comfy_execution")
comfy_nodes = Part("nodes")
folder_paths = Part("folder_paths")
latent_preview = Part("latent_preview")
server = Part("server")

BASE = comfy.supported_models_base.BASE
BaseModel = comfy.model_base.BaseModel
CallbacksMP = Part("comfy.patcher_extension.CallbacksMP")
CFGGuider = comfy.samplers.CFGGuider
ControlBase = comfy.controlnet.ControlBase
LoRAAdapter = comfy.weight_adapter.lora.LoRAAdapter
ModelPatcher = comfy.model_patcher.ModelPatcher
NestedTensor = comfy.nested_tensor.NestedTensor
NodeState = comfy_execution.progress.NodeState
PromptServer = server.PromptServer
VAE = comfy.sd.VAE
WeightHook = comfy.hooks.WeightHook
WrapperExecutor = comfy.patcher_extension.WrapperExecutor
WrappersMP = Part("comfy.patcher_extension.WrappersMP")
adapters = comfy.weight_adapter.adapters
args = comfy.cli_args.args
check_cancelled = comfy.model_management.throw_exception_if_processing_interrupted
get_all_wrappers = comfy.patcher_extension.get_all_wrappers
get_executing_context = comfy_api.latest.get_executing_context
get_progress_state = comfy_api.latest.get_progress_state
