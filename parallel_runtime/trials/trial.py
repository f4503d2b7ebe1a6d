"""A model's calls: computed in ranks with hooks on ComfyUI's module, and in one process without ours.

The bare module runs in a process of its own (planner/comfyui_process.py). The calls are those that ComfyUI makes in a
run of its own of random latents and conditionings: what is compared is each call's result, step by step of that run.
`against` diffusers, its unmodified model computes the same calls in this process (reference_model.py).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeAlias

import torch
from safetensors.torch import load_file

from ..checkpoint import ModelSpec, read_header
from ..devices import Device
from ..model_call import ModelCall
from ..plan import ParallelPlan
from ..planner.comfyui_process import ComfyUIProcess, find_comfyui
from ..wire.protocol import dtype_name
from .reference_model import load_reference_model
from .workload import Workload

COMFYUI, DIFFUSERS = "comfyui", "diffusers"
Results: TypeAlias = list[torch.Tensor]
RunCalls: TypeAlias = Callable[[Sequence[ModelCall]], Results]


class Trial:
    """A model's calls, its reference, and how both are compared. Its reference is let go by `close`.

    `coarse`: how much rounding of layers' inputs may move an output, where a last digit decides; 0 where none rounds.
    Raises `ValueError` for a file, a plan, a ComfyUI or a diffusers that cannot be used.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        workload: Workload,
        plans: Sequence[ParallelPlan],
        *,
        steps: int,
        comfyui: str | None,
        device: Device,
        step_cache: float = 0.0,
        against: str = COMFYUI,
    ) -> None:
        header = read_header(path)
        self._diffusers = load_reference_model(header) if against == DIFFUSERS else None
        self.reference_model = "ComfyUI" if against == COMFYUI else DIFFUSERS
        self._workload, self._steps = workload, steps
        # of each call
        self.text_tokens = [workload.text_tokens, *([workload.shorter_text] * (max(plan.cfg for plan in plans) - 1))]
        found = find_comfyui(comfyui)
        self._on_cpu = device.kind == "cpu"
        self._process = ComfyUIProcess(found, "cpu" if self._on_cpu else str(device))
        try:
            shared = {
                "split": any(plan.parts > 1 for plan in plans),
                "stages": max(plan.pipefusion for plan in plans),
                "step_cache": step_cache,
            }
            opened = self._process.ask("open", path=os.path.abspath(path), dtype=dtype, **shared)
            self.title: str = opened["model"]
            self.coarse: float = opened["coarse"]
            spec = ModelSpec.of(path, opened["dtype"], comfyui=found, kept=opened["kept"])
            self.spec = replace(spec, found=opened["found"])
            self._take_calls()
        except BaseException:
            self.close()
            raise

    def _take_calls(self) -> None:
        file = str(self._process.folder / "calls.safetensors")
        size = asdict(self._workload)
        made = self._process.ask("calls", size=size, texts=self.text_tokens, steps=self._steps, file=file)
        tensors = load_file(file)
        self.shapes: list[list[int]] = made["shapes"]
        self._outs = {torch.float32: [], getattr(torch, self.spec.dtype): self._joined(tensors)}
        self._by_step: list[list[ModelCall]] = []
        for step, calls in enumerate(made["options"]):
            self._by_step.append([])
            for number, options in enumerate(calls):
                given = {f"t{n}": tensors[f"{step}.{number}.t{n}"] for n in range(options["tensors"])}
                shape = tuple(tensors[f"{step}.{number}.out"].shape)
                call = ModelCall(tensors=given, out_shape=shape, options=options)
                self._by_step[-1].append(call)

    def _joined(self, tensors: dict[str, torch.Tensor]) -> Results:
        """The outputs of each call over all steps side by side, (B, steps * numbers)."""
        return [
            torch.cat([tensors[f"{step}.{number}.out"] for step in range(self._steps)], 1)
            for number in range(len(self.text_tokens))
        ]

    @property
    def calls(self) -> list[ModelCall]:
        """Those of the first step."""
        return self._by_step[0]

    @property
    def sizes(self) -> dict[str, object]:
        """Pixels, images and text; tokens of an image are not known here."""
        sizes = {name: getattr(self._workload, name) for name in ("width", "height", "batch", "text_tokens")}
        found: dict[str, object] = {"model": self.title, **sizes}
        (first, *_) = self.shapes
        return found | ({"frames": first[2]} if len(first) == 5 and first[2] > 1 else {})

    def results(self, run: RunCalls) -> Results:
        """Each call's results in all steps, side by side."""
        by_step = [run(calls) for calls in self._by_step]
        return [torch.cat(outs, 1) for outs in zip(*by_step, strict=True)]

    def references(self, dtype: torch.dtype, rounded_to: torch.dtype) -> Results:
        """The same of one process in `dtype`; the calls' numbers are rounded as ComfyUI rounded them when it made them.

        `rounded_to`: in what the ranks compute.
        """
        if self._diffusers is not None:
            scale_dtype = rounded_to if self._on_cpu else torch.float32
            reference = self._diffusers(self.spec.path, dtype=dtype, scale_dtype=scale_dtype)
            return self.results(lambda calls: [reference(call) for call in calls])
        if not self._outs.get(dtype):
            file = str(self._process.folder / "outputs.safetensors")
            self._process.ask("outputs", dtype=dtype_name(dtype), file=file)
            self._outs[dtype] = self._joined(load_file(file))
        return self._outs[dtype]

    def compute_once(self, threads: int) -> None:
        """Have ComfyUI's bare module compute the calls of the first step, on so many threads of a CPU; for a clock."""
        self._process.ask("run", threads=threads)

    def close(self) -> None:
        """End ComfyUI's process; results that were not asked for are gone."""
        self._process.close()
