"""What verify runs of a model: its calls, in ranks and in one process that knows nothing of ours.

`Trial` is what it asks of a model. Owns the trial of models whose blocks are ours; hosted_trial.py has that of all
others. Which it is, the file says.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from ..checkpoint import ModelSpec, read_header
from ..models.family import Family, Reference
from ..parallel.pipefusion import PatchedSequence
from ..plan import BatchSlice, ParallelPlan
from ..pool.calls import ModelCall
from .reference_model import load_reference_model, reference_version
from .workload import Workload, euler

Inputs: TypeAlias = Mapping[str, torch.Tensor] | ModelCall
Results: TypeAlias = list[torch.Tensor]
RunCalls: TypeAlias = Callable[[Sequence[Inputs]], Results]


class Trial(Protocol):
    """A model's calls, its reference, and how both are compared. Its reference is let go by `close`."""

    @property
    def spec(self) -> ModelSpec:
        """The model as the ranks load it."""
        ...

    @property
    def calls(self) -> Sequence[Inputs]:
        """The calls of one step, as `PlanRunner` takes them."""
        ...

    @property
    def text_tokens(self) -> list[int]:
        """Of each call."""
        ...

    @property
    def sizes(self) -> dict[str, object]:
        """What was computed, as the reports name it."""
        ...

    @property
    def reference_model(self) -> str:
        """Whose the reference is, as people know it."""
        ...

    @property
    def coarse(self) -> float:
        """How much rounding of layers' inputs may move an output, where a last digit decides; 0 where none rounds."""

    @property
    def versions(self) -> dict[str, str]:
        """The version of whose the reference is."""
        ...

    def results(self, run: RunCalls, dtype: torch.dtype) -> Results:
        """Each call's result over all steps, by ranks that compute in `dtype`; `run` has them compute some calls."""
        ...

    def references(self, dtype: torch.dtype, rounded_to: torch.dtype) -> Results:
        """The same by the reference in `dtype`, given numbers that were rounded for ranks that compute in another."""
        ...

    def written(self, result: torch.Tensor, plan: ParallelPlan, rank: int, piece: BatchSlice) -> torch.Tensor:
        """What a rank wrote of a call's result when it ran a piece."""
        ...

    def one_process(self, dtype: torch.dtype, threads: int | None) -> Callable[[], torch.Tensor]:
        """The reference as a function that computes the calls of a step; `threads` of a CPU, None on a GPU."""
        ...

    def close(self) -> None:
        """Let go of the reference."""
        ...


class OwnTrial:
    """Of a model whose blocks are ours. Its reference is the unmodified diffusers model, in this process.

    Raises `ValueError` for a file or a plan that cannot be run, and where diffusers is missing.
    """

    reference_model = "diffusers"
    coarse = 0.0

    def __init__(
        self,
        family: Family,
        path: str,
        dtype: str,
        workload: Workload,
        plans: Sequence[ParallelPlan],
        *,
        steps: int,
        on_cpu: bool,
    ) -> None:
        self._make = load_reference_model(family)  # refused before anything starts
        self._model = family.read(read_header(path))
        for plan in plans:
            self._model.check_plan(plan)
        self.spec = ModelSpec.of(path, dtype)
        self._workload, self._steps = workload, steps
        self.calls: list[dict[str, torch.Tensor]] = workload.calls(self._model.config, max(p.cfg for p in plans))
        self._on_cpu = on_cpu
        self._reference: Reference | None = None  # that the clock is held to

    @property
    def text_tokens(self) -> list[int]:
        """Of each call."""
        return [call["txt"].shape[1] for call in self.calls]

    @property
    def sizes(self) -> dict[str, object]:
        """Pixels, tokens and images."""
        return {
            name: getattr(self._workload, name) for name in ("width", "height", "batch", "image_tokens", "text_tokens")
        }

    @property
    def versions(self) -> dict[str, str]:
        """That of diffusers."""
        return {"diffusers": reference_version()}

    def results(self, run: RunCalls, dtype: torch.dtype) -> Results:
        """The latents at the end of as many Euler steps as are run; of one step, what the model says."""
        return euler(self._cast_to(dtype, run), self.calls, self._steps)

    def references(self, dtype: torch.dtype, rounded_to: torch.dtype) -> Results:
        """The same of diffusers, with inputs and scales rounded as for those ranks."""
        scale_dtype = rounded_to if self._on_cpu else torch.float32
        reference = self._make(self.spec.path, dtype=dtype, scale_dtype=scale_dtype)
        return self.results(lambda calls: [reference(call) for call in tensors_of(calls)], rounded_to)

    def written(self, result: torch.Tensor, plan: ParallelPlan, rank: int, piece: BatchSlice) -> torch.Tensor:
        """This rank's tokens of the piece's rows; of a pipeline, what the last stage wrote in its place."""
        call, start, stop = piece
        sequence = PatchedSequence(self.text_tokens[call], result.shape[1], plan.num_patches, plan.parts)
        return sequence.take(result[start:stop], part=rank % plan.parts, stream="image", dim=1)

    def one_process(self, dtype: torch.dtype, threads: int | None) -> Callable[[], torch.Tensor]:
        """diffusers in this process: on the first device where there are no threads to choose."""
        if self._reference is None:
            self._reference = self._make(self.spec.path, dtype=dtype, device="cpu" if threads else "cuda:0")
        reference, calls = self._reference, self.calls
        if threads is None:
            there = [{name: tensor.to("cuda:0") for name, tensor in call.items()} for call in calls]
            return lambda: torch.cat(list(map(reference, there))).cpu()

        def run() -> torch.Tensor:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                return torch.cat(list(map(reference, calls)))
            finally:
                torch.set_num_threads(before)

        return run

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def _cast_to(
        self, dtype: torch.dtype, run: RunCalls
    ) -> Callable[[list[dict[str, torch.Tensor]]], list[torch.Tensor]]:
        """`run`, its calls' inputs rounded first as ComfyUI rounds them for a model that computes in `dtype`."""
        return lambda calls: run([self._model.cast_inputs(call, dtype) for call in calls])


def tensors_of(calls: Sequence[Inputs]) -> list[Mapping[str, torch.Tensor]]:
    """The tensors of each call."""
    return [call.tensors if isinstance(call, ModelCall) else call for call in calls]
