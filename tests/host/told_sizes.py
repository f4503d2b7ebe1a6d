"""Has ComfyUI's detection take a model's sizes from its file's metadata, for every family.

ComfyUI does so itself for LTX, Wan and some others (`config`, `transformer`); of most families it fixes widths or depth
at those of the published files, which are of many gigabytes. Owns that one change, in a test host, in its ranks and in
the child that names tensors. What the class, its conditionings and its sampling are stays ComfyUI's.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from typing import Any

DETECTION = "comfy.model_detection"


def tell_sizes(detection: Any) -> None:
    """Change ComfyUI's module `comfy.model_detection`, once."""
    stock = detection.detect_unet_config
    if hasattr(stock, "told_sizes"):
        return

    def detect_unet_config(state_dict: Any, key_prefix: str, metadata: dict[str, str] | None = None) -> Any:
        found = stock(state_dict, key_prefix, metadata=metadata)
        if found is not None:
            found |= json.loads((metadata or {}).get("config", "{}")).get("transformer", {})
        return found

    stock_config = detection.model_config_from_unet

    def model_config_from_unet(*args: Any, metadata: dict[str, str] | None = None, **more: Any) -> Any:
        """What a class of ComfyUI's list of models fixes beside the detection is told, too."""
        config = stock_config(*args, metadata=metadata, **more)
        told = json.loads((metadata or {}).get("config", "{}")).get("transformer", {})
        fixed = getattr(config, "unet_extra_config", {})
        if config is not None:
            config.unet_config |= {name: value for name, value in told.items() if name in fixed}
        return config

    detect_unet_config.told_sizes = True  # type: ignore[attr-defined]
    detection.detect_unet_config = detect_unet_config
    detection.model_config_from_unet = model_config_from_unet


class _WhenImported(importlib.abc.MetaPathFinder):
    """Changes the module when a rank imports it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != DETECTION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            tell_sizes(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def tell_sizes_when_imported() -> None:
    """Change it in this process as soon as something imports it."""
    sys.meta_path.insert(0, _WhenImported())
