"""ComfyUI's own module in one process, without hooks of this pack: verify compares a plan with it.

`python -m parallel_runtime.models.hosted.reference` is that process, and this its whole life: it reads a question a
line from standard input, JSON, and answers each with a line; tensors go through .safetensors files. Its arguments are
what process/lifeline.py takes. Owns the questions. The asking side is planner/comfyui_process.py.
"""

import io
import json
import math
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from ...checkpoint import ComfyUI, ModelSpec, read_header
from ...errors import in_one_line
from ...mapped_file import MappedFile
from ...process.lifeline import arm
from ...torch_flags import exact_fp32
from ...wire.protocol import dtype_name
from ..specs import find_spec, may_be_found, spec_of
from ..specs.found import found_of, found_spec_of, give_found, of_text, to_text
from .build import Built, build, recognise
from .calls import INSIDE, from_tree, takes_whole_batches
from .comfyui import import_comfyui
from .contract import LINES
from .contract_check import NOTHING, find, look, off_by_feature
from .count import count_model
from .dtypes import loaded_dtypes
from .first_block import refuse_step_cache
from .formats import coarse_inputs
from .hook_points import find_hook_points
from .kept_state import forget_keys
from .random_calls import (
    USUAL_FRAMES,
    Recorded,
    Size,
    find_widths,
    flat,
    frames_of,
    latent_shapes,
    make_calls,
    uncomputed_call,
)
from .stage import refuse_stages
from .valueless import take_values

QUESTIONS = ("start", "contract", "open", "describe", "count", "made", "calls", "outputs", "run")

MOST_COMPUTED_BYTES = 8 * 10**9  # of weights with which a call is computed to be counted: minutes of a CPU

Looked = TypeVar("Looked")


class Reference:
    """Answers questions about a file's model, one file at a time, built anew for each dtype that it computes in."""

    questions: tuple[str, ...] = QUESTIONS
    tell: Callable[[str], None] = staticmethod(lambda _: None)  # what goes on, to the other side, before the answer

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.path, self.dtype, self.kept = "", torch.float32, ""
        self.found: str | None = None  # as `count` takes it
        self._built: Built | None = None
        self._built_in = self.dtype
        self._steps: list[list[Recorded]] = []

    def start(self, path: str, options: list[str], device: str, counting: bool = False) -> dict[str, Any]:
        """Import ComfyUI. `counting`: with its attention function replaced, for `count` alone."""
        self.device = torch.device(device)
        import_comfyui(ComfyUI(path, tuple(options)), self.device, shared=counting)
        return {}

    def contract(self) -> dict[str, Any]:
        """The version of this ComfyUI, and what of its `comfy` the host contract misses, a sentence a feature.

        The other parts of ComfyUI are looked at where they run: when it loads the pack.
        """
        found = find("comfyui_version.__version__")
        version = "without a version" if found is NOTHING else str(found)
        missing = look([line for line in LINES if line.name.startswith("comfy.")])
        return {"version": version, "off": list(off_by_feature(missing, version).values())}

    def open(self, path: str, dtype: str, split: bool, stages: int, step_cache: float = 0.0) -> dict[str, Any]:
        """Build the model; its name, the dtype that it computes in, how coarsely its layers round what they are given.

        `split`: ranks are to share its tokens; `stages`: so many its blocks; `step_cache`: its threshold, 0 for none.

        Raises `ValueError` for a file that is none of ComfyUI's, and for a class whose tokens cannot be shared.
        """
        self.path = path
        recognised = self._recognise()
        self.dtype, self.kept = loaded_dtypes(dtype, recognised.weights, recognised.config, self.device)
        self._build(self.dtype)
        if stages > 1:
            refuse_stages(self._opened.module, stages)
        refuse_step_cache(self._opened.module, step_cache)
        if split or stages > 1:
            find_hook_points(self._opened.module, spec_of(self._opened.module))
        return {
            "model": type(self._opened.whole).__name__,
            "dtype": dtype_name(self.dtype),
            "kept": self.kept,
            "coarse": coarse_inputs(recognised.config, recognised.weights, self.kept),
            "found": to_text(find_spec(self._opened.module)) if found_of(self._opened.module) else "",
        }

    def describe(self, path: str) -> dict[str, Any]:
        """What a file is, without its weights being used: names, bytes, and what ComfyUI reckons a call to take.

        `unshared` says why no ranks can share its tokens. Raises `ValueError` for a file that is none of ComfyUI's.
        """
        self.path = path
        recognised = self._recognise()
        dtype, _ = loaded_dtypes("default", recognised.weights, recognised.config, self.device)
        built = self._planned(build(path, recognised, dtype), recognised.kind)
        kind, unshared = type(built.module), ""
        try:
            find_hook_points(built.module, spec_of(built.module))
        except ValueError as error:
            unshared = str(error)
        try:
            latent = list(
                latent_shapes(built.whole, Size(width=1024, height=1024, text_tokens=512, batch=1, seed=0))[0]
            )
        except ValueError:  # neither images nor videos
            latent = None
        return {
            "model": type(built.whole).__name__,
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "dtype": dtype_name(dtype),
            "unshared": unshared,
            "weight_bytes": sum(weight.nbytes for weight in recognised.weights.values()),
            "block_bytes": _block_bytes(built.module, recognised.weights),
            "latent": latent,
            "activation_bytes": 0 if latent is None else int(built.whole.memory_required(latent)),
        }

    def count(self, path: str, dtype: str, size: Mapping[str, Any], found: str | None = None) -> dict[str, Any]:
        """What `planner.counted.CountedModel` is made of; `numbers`: those of a row's latent of that size, a video's of
        so many `frames`.

        `found`: the plan that was found for its class, "" for none, None for what the user has kept.

        Raises `ValueError` for a file that is none of ComfyUI's, and for a model that no random call can be made of.
        """
        self.found, frames = found, size.get("frames")
        recognised, built, counted = self._valueless(path, dtype, partial(count_model, frames=frames))
        kind = type(built.module)
        shapes = latent_shapes(built.whole, Size(**size), usual_frames=USUAL_FRAMES)
        return counted | {
            "model": type(built.whole).__name__,
            "numbers": sum(math.prod(shape) for shape in shapes) // size["batch"],
            "frames": frames_of(built.whole, Size(**size), usual_frames=USUAL_FRAMES),
            "small_numbers": _of_small_numbers(recognised.weights),
            "element_bytes": self.dtype.itemsize,
            "weight_bytes": sum(weight.nbytes for weight in recognised.weights.values()),
            "block_bytes": _block_bytes(built.module, recognised.weights),
            "whole_batches": takes_whole_batches(kind),
        }

    def made(self, path: str, dtype: str, size: Mapping[str, Any], file: str) -> dict[str, Any]:
        """Make a random call of all rows of `size` and compute nothing; its tensors go to `file`, its form is the
        answer, with `numbers` as `count` has them. Raises `ValueError` as `count`."""
        asked = Size(**size)
        _, built, widths = self._valueless(path, dtype, lambda model, device: find_widths(model, asked, device))
        shapes = latent_shapes(built.whole, asked, usual_frames=USUAL_FRAMES)
        call = uncomputed_call(built.whole, asked, shapes, widths)
        _save(call.tensors, file)
        numbers = sum(math.prod(shape) for shape in shapes) // asked.batch
        return {"options": call.options, "out_shape": list(call.out_shape), "numbers": numbers}

    def _valueless(
        self, path: str, dtype: str, look: Callable[[Any, torch.device], Looked]
    ) -> tuple[Any, Built, Looked]:
        """A file's model as it was recognised and built, and what `look(model, device)` finds of it without values of
        its weights; with them where it needs those. Raises `ValueError` where they are too many for that."""
        self.path = path
        recognised = self._recognise()
        self.dtype, self.kept = loaded_dtypes(dtype, recognised.weights, recognised.config, self.device)
        built = self._planned(build(path, recognised, self.dtype), recognised.kind)
        with suppress(NotImplementedError, RuntimeError, TypeError, ValueError):
            built.module.to("meta")
            built.round_here()  # a class may compute some weights in fp32, whatever the file has
            return recognised, built, look(built.whole, torch.device("meta"))
        built = self._planned(build(path, recognised, self.dtype), recognised.kind)
        try:  # its forward reads values of what it is given, or of buffers
            take_values(built.module)
            built.round_here()
            return recognised, built, look(built.whole, torch.device("cpu"))
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # or of what comes of its weights
            num_bytes, name = sum(weight.nbytes for weight in recognised.weights.values()), type(built.whole).__name__
            if num_bytes > MOST_COMPUTED_BYTES:
                raise ValueError(
                    f"{name} needs the values of its weights, and {num_bytes / 1e9:.1f} GB of them are too many to try "
                    f"on the CPU, {MOST_COMPUTED_BYTES / 1e9:.0f} GB the most ({in_one_line(error)})"
                ) from error
        self._built = None
        self._build(self.dtype)
        return recognised, self._opened, look(self._opened.whole, self.device)

    def calls(self, size: Mapping[str, Any], texts: list[int], steps: int, file: str) -> dict[str, Any]:
        """Make random calls and compute them; inputs and outputs go to `file`, their form is the answer."""
        with torch.inference_mode(), exact_fp32():
            self._steps = make_calls(self._opened.whole, Size(**size), texts, steps=steps, device=self.device)
        tensors: dict[str, torch.Tensor] = {}
        for step, calls in enumerate(self._steps):
            for number, each in enumerate(calls):
                tensors |= {f"{step}.{number}.{name}": tensor for name, tensor in each.call.tensors.items()}
                tensors[f"{step}.{number}.out"] = each.out
        _save(tensors, file)
        return {
            "options": [[each.call.options for each in calls] for calls in self._steps],
            "shapes": [list(shape) for shape in self._steps[0][0].call.shapes],
        }

    def outputs(self, dtype: str, file: str) -> None:
        """The same calls computed in another dtype; outputs go to `file`."""
        self._build(getattr(torch, dtype))
        with exact_fp32():
            outs = {
                f"{step}.{number}.out": self._compute(each)
                for step, calls in enumerate(self._steps)
                for number, each in enumerate(calls)
            }
        _save(outs, file)
        self._build(self.dtype)

    def run(self, threads: int) -> None:
        """Compute the calls of the first step once, on so many threads where a CPU computes."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for each in self._steps[0]:
                self._compute(each)
        finally:
            torch.set_num_threads(before)

    @property
    def _opened(self) -> Built:
        if self._built is None:
            raise RuntimeError("no file was opened")
        return self._built

    def _recognise(self) -> Any:  # noqa: ANN401
        spec = ModelSpec.of(self.path)  # first: the header is this file's, or it is refused
        header, file = read_header(self.path), MappedFile(spec)
        tensors = {name: file.tensor(entry) for name, entry in header.tensors.items()}
        return recognise(self.path, tensors, header.metadata)

    def _build(self, dtype: torch.dtype) -> None:
        if self._built is not None and self._built_in == dtype:
            return
        self._built = None  # what it took goes first
        recognised = self._recognise()
        built = self._planned(build(self.path, recognised, dtype, kept=self.kept), recognised.kind)
        built.round_here()
        built.module.to(self.device)
        self._built, self._built_in = built, dtype

    def _planned(self, built: Built, file_kind: str) -> Built:
        """The same, whose module has the plan that was found for its class."""
        kind = type(built.module)
        if may_be_found(kind):
            kept = self.found is None
            found = found_spec_of(kind, file_kind) if kept else of_text(self.found) if self.found else None
            if found is not None:
                give_found(built.module, found)
        return built

    @torch.inference_mode()
    def _compute(self, recorded: Recorded) -> torch.Tensor:
        """The outputs of a call, whose numbers were rounded to the first dtype, in the dtype that the model has now."""
        call = recorded.call
        tensors = [self._here(call.tensors[f"t{number}"]) for number in range(len(call.tensors))]
        given: Any = from_tree(call.options["call"], tensors)
        module: Any = self._opened.module
        forget_keys(module)
        function = module._forward if call.options.get(INSIDE) else module
        return flat(function(*given["args"], **given["kwargs"]), call.out_shape[0])

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        wider = tensor.is_floating_point() and tensor.dtype == self.dtype
        return tensor.to(self.device, self._built_in if wider else tensor.dtype, copy=True)


def _of_small_numbers(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether most of a file's bytes are numbers of a byte each, or smaller ones packed."""
    small = sum(each.nbytes for each in weights.values() if each.dtype.itemsize == 1)
    return 2 * small > sum(each.nbytes for each in weights.values())


def _block_bytes(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> list[int]:
    """Of each block in the spec's lists; of a model without a spec, of each member of any list."""
    spec, blocks = find_spec(module), Counter[str]()
    lists = "[^.]+" if spec is None else "|".join(map(re.escape, spec.attention))
    for name, weight in weights.items():
        if in_block := re.match(rf"(?:{lists})\.\d+\.", name):
            blocks[in_block[0]] += weight.nbytes
    return list(blocks.values())


def _save(tensors: Mapping[str, torch.Tensor], file: str) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, file)


def answer(reference: Reference, line: str) -> dict[str, Any]:
    """The answer to one question; what a user can get wrong is an answer too."""
    question = json.loads(line)
    try:
        if question["do"] not in reference.questions:
            raise RuntimeError(f"there is no question {question['do']!r}")
        return {"answer": getattr(reference, question["do"])(**question["with"])}
    except ModuleNotFoundError as error:
        return {"missing": error.name or str(error)}
    except ValueError as error:
        return {"refused": str(error)}


def serve(reference: Reference) -> None:
    """Answer until the other side goes, however it does. What ComfyUI prints goes to standard error."""
    arm(*map(int, sys.argv[1:3]))
    answers = io.TextIOWrapper(os.fdopen(os.dup(sys.stdout.fileno()), "wb"), encoding="utf-8", line_buffering=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reference.tell = lambda text: _write(answers, {"told": text})
    for line in sys.stdin:
        try:
            said = answer(reference, line)
        except Exception as error:  # noqa: BLE001  told to the other side, which ends
            traceback.print_exc()
            said = {"failed": in_one_line(error)}
        _write(answers, said)


def _write(answers: io.TextIOWrapper, said: Mapping[str, Any]) -> None:
    answers.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    serve(Reference())
