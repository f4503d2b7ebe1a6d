"""Asks ComfyUI's own classes, in a child process, which tensors a model has, and what its detection makes of a file.

Owns: both sides of that child. Run as a script it is the child: it imports comfy, reads one JSON document from standard
input and writes one to standard output. Imported, it is the asking side and imports nothing of ComfyUI.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Shapes = dict[str, list[int]]
TIMEOUT_S = 240


def shapes_of(classes: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Shapes]:
    """By file name, the names and shapes of the state dict of a class (its dotted path) built with the arguments.

    Without those whose class this ComfyUI does not have, or with other arguments.
    """
    return _ask("shapes", {name: list(each) for name, each in classes.items()})


def detected(paths: list[str]) -> dict[str, dict[str, Any]]:
    """By path, what ComfyUI's detection makes of a file: `class`, and `missing` and `unexpected` tensors."""
    return _ask("detected", paths)


def _ask(question: str, about: Any) -> dict[str, Any]:
    from host.fetch import comfyui_path

    result = subprocess.run(
        [sys.executable, __file__, str(comfyui_path())],
        input=json.dumps([question, about]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"ComfyUI's classes could not be asked for {question}: {result.stderr[-3000:]}")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def _shapes(classes: dict[str, Any]) -> dict[str, Shapes]:
    import importlib

    import comfy.ops
    import torch

    found = {}
    for name, (path, arguments) in classes.items():
        module, _, class_name = path.rpartition(".")
        try:
            built = getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError):
            continue
        arguments |= {"dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
        try:
            model = built(**arguments, device="meta")
        except RuntimeError:  # a class that reads a value of what it makes
            model = built(**arguments, device="cpu")
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            continue
        found[name] = {key: list(value.shape) for key, value in model.state_dict().items()}
    return found


def _detected(paths: list[str]) -> dict[str, dict[str, Any]]:
    """The child's answer to `detected`: the stock steps up to the names that are loaded, on the meta device."""
    import comfy.model_detection
    import torch
    from safetensors import safe_open

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from host.told_sizes import tell_sizes

    tell_sizes(comfy.model_detection)

    found = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
            state = {  # the loader asks for values of a bias or a gate, never for those of a matrix
                key: torch.empty(shape, device="meta") if len(shape) > 1 else file.get_tensor(key).float()
                for key, shape in shapes.items()
            }
        config = comfy.model_detection.model_config_from_unet(state, "", metadata=metadata)
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(state, "", device="meta").diffusion_model
        has = {key: list(value.shape) for key, value in model.state_dict().items()}
        given = {key: list(value.shape) for key, value in config.process_unet_state_dict(state).items()}
        found[path] = {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "missing": [key for key in has if given.get(key) != has[key]],
            "unexpected": [key for key in given if key not in has],
        }
    return found


def _answer() -> None:
    path, question = sys.argv[1], json.load(sys.stdin)
    sys.path[0] = path
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    answer = {"shapes": _shapes, "detected": _detected}[question[0]](question[1])
    print("\n" + json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    _answer()
