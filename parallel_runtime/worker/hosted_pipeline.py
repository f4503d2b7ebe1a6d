"""A step of one of ComfyUI's own models on one stage of a pipeline, patch by patch.

    stage 0 | p0 | p1 | p2 |              a step begins and ends with the pipeline empty
    stage 1      | p0 | p1 | p2 |

Every pass is a call of ComfyUI's forward, of which the stage's blocks alone run (models/hosted/stage.py); what stands
before the blocks every stage computes for itself. The last stage writes the result. Source: PipeFusion
(arXiv 2405.14430). Owns the order of passes and what crosses a link. Which call may use the keys of the one before is
held_state.py's to say.

The dtypes of what crosses are the sender's to know: they go ahead in a call that is warm-up, and are kept with its
keys.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..models.hosted.pass_call import PassCall, PassEndsError
from ..parallel.attention import SequenceParallelAttention
from ..parallel.kept_keys import HeldRows
from ..plan import BatchSlice
from ..timing import RegionTimer
from ..wire.protocol import DTYPE_BYTES
from .held_state import HeldState
from .hosted import HostedForward, HostedModel, NewCall
from .mesh import Mesh

DTYPES = tuple(getattr(torch, name) for name in sorted(DTYPE_BYTES))


class Passes:
    """Passes of calls through this rank's stage of `mesh`'s plan, and what crosses its links in one request.

    `send` and `receive` are what stage.py asks of its neighbours, in the pass that was begun last.
    """

    def __init__(self, model: HostedModel, mesh: Mesh, *, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now`: the clock by which arrivals are noted."""
        self.stage, self.patches = mesh.axes["pipefusion"].index, mesh.plan.num_patches
        self.first, self.last = self.stage == 0, self.stage == mesh.plan.pipefusion - 1
        self.arrived_s = 0.0  # when all that the pass received last was there
        self._model, self._device, self._now = model, model.weights.device, now
        self.previous, self.next = mesh.previous_stage, mesh.next_stage
        self._held, self._warm = HeldRows(), False

    def begin(self, group: SequenceParallelAttention, held: HeldRows, patch: int | None, *, only_last: bool) -> NewCall:
        """A pass of a patch of a call that `group` shares, None: of all its tokens; what makes the call's state.

        `held`: the keys of the call before it. `only_last`: on the last stage, what the model says is asked of the last
        patch alone. The model's blocks are this stage's until `end`.
        """
        self._held, self._warm, self.arrived_s = held, patch is None, 0.0
        staged = self._model.staged
        staged.neighbours = self
        staged.begin(later=bool(patch))
        return partial(
            PassCall,
            group,
            patches=self.patches,
            patch=patch,
            held=held,
            before=staged.before,
            ends=self.last and only_last and patch is not None and patch + 1 < self.patches,
        )

    def end(self) -> None:
        """Have the model run as it is, and keep nothing of the passes: a stage's keys are gigabytes."""
        self._model.staged.neighbours = None
        for shared in (self._model.shared, self._model.between):
            if shared is not None:
                shared.new_call = None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the stage's last block made."""
        tensors = [tensor.contiguous() for tensor in tensors]  # no launch while the first of them waits (links.py)
        if self._warm:
            self.next.send(torch.tensor([DTYPES.index(tensor.dtype) for tensor in tensors], device=self._device))
        for tensor in tensors:
            self.next.send(tensor)

    def receive(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the stage's first block takes, in the shapes of these."""
        if self._warm:
            codes = self.receive_one([len(like)], torch.int64)
            self._held.dtypes = tuple(DTYPES[code] for code in codes.tolist())
        came = [self.receive_one(tensor.shape, dtype) for tensor, dtype in zip(like, self._held.dtypes, strict=True)]
        self.arrived_s = self._now()
        return came

    def receive_one(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Of the stage before. Nothing that it sends depends on what this stage has still to queue."""
        return self.previous.receive(shape, dtype, device=self._device)


class HostedPipeline(HostedForward):
    """The pieces of a request on this rank."""

    def __init__(
        self,
        model: HostedModel,
        mesh: Mesh,
        timer: RegionTimer,
        beat: Callable[[], None],
        held: HeldState,
    ) -> None:
        super().__init__(model, mesh.attention, timer, beat, held)
        self._passes = Passes(model, mesh)

    def run_batch_groups(self, *arguments: Any) -> None:  # noqa: ANN401
        """As `HostedForward.run_batch_groups`; returns when what was sent has been received."""
        try:
            super().run_batch_groups(*arguments)
        finally:
            self._passes.end()
        self._passes.next.drain()

    def run(
        self,
        piece: BatchSlice,
        whole: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        *,
        write: bool = True,
        over: Any = None,  # noqa: ANN401  as HostedForward's
    ) -> None:
        """As `HostedForward.run`, in passes."""
        if options.get("method") is not None:  # weights outside of the blocks, which every stage has
            super().run(piece, whole, options, write=write and self._passes.last, over=over)
            return
        held, warm = self.held.keys_of(piece), self.held.warms_up(piece)
        group, out = self.sequence_of(options), None
        for patch in [None] if warm else range(self._passes.patches):
            new_call = self._passes.begin(group, held, patch, only_last=True)
            try:
                out = self.call(piece, whole, options, sequence=group, over=over, new_call=new_call)
            except PassEndsError:
                self.beat()
        if self._passes.last and write:
            self.write(piece, whole["out"], out)
