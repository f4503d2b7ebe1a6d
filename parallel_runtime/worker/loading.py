"""The models of one rank: loaded, changed, evicted and dropped.

Owns what must go for a model that comes. Which model a step runs is the engine's to say.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from ..checkpoint import ModelSpec
from ..errors import BESIDE_BLOCKS, RequestCancelledError
from ..exchange_groups import weight_groups
from ..models.hosted.comfyui import what_was_imported
from ..parallel.collectives import Axis
from ..plan import Layout
from ..timing import wait_for
from ..torch_flags import set_flags
from ..weights.device_memory import empty_cache
from ..weights.host_memory import give_back_heap, give_back_pinned
from ..wire.protocol import dtype_name
from ..wire.replies import Cancelled, Compiling, LoadReply, Memory, MemoryReply, Progress, StrengthsReply
from ..wire.requests import ChangeWeights, Load, SetStrengths, Unload
from .hosted import HostedModel
from .hosted_weights import HostedWeights
from .measure import free_bytes

SELDOM = 1_000  # collections of the middle generation until Python collects all; 10 by itself


def open_model(spec: ModelSpec, layout: Layout, *, rank: int, device: torch.device, group: Axis) -> HostedModel:
    """The model in that layout, its weights still to be loaded. Raises `ValueError` for a file that changed."""
    spec.refuse_changed()
    weights = HostedWeights(
        spec,
        device=device,
        group=group,
        offloaded=layout.offloaded,
        stages=layout.stages,
        stage=layout.stage_of(rank),
        shares=next((layout.shares_of(each.ranks) for each in weight_groups(layout) if rank in each.ranks), ()),
        stage_shares=layout.stage_shares,
    )
    return HostedModel(weights)


class LoadedModels(dict[int, HostedModel]):
    """The models of one rank by handle. `memory` says what the rank occupies, for replies."""

    def __init__(self, *, rank: int, device: torch.device, memory: Callable[[], Memory]) -> None:
        super().__init__()
        self._rank, self._device, self._memory = rank, device, memory
        self.switched: ModelSpec | None = None  # whose switches of torch are set; None: not known

    def load(
        self,
        request: Load,
        *,
        group: Axis,
        progress: Callable[[Progress | Compiling], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> LoadReply | Cancelled:
        """Have the model, its shards put together by `group`, unless this rank has it already or sleeps."""

        def report(loaded: int, total: int) -> None:
            beat()
            progress(Progress(done=loaded, total=total))

        if not request.first_rank <= self._rank < request.layout.ranks:
            return LoadReply(memory=self._memory())
        began = time.perf_counter()
        model = open_model(request.spec, request.layout, rank=self._rank, device=self._device, group=group)
        evicted = self._make_room(model.weights.needed_bytes, order=request.eviction_order, budget=request.budget_bytes)
        loaded = False
        with suppress(RequestCancelledError):
            model.weights.load(progress=report, cancelled=cancelled)
            loaded = True
        if not loaded:  # what had to go for it is gone all the same, and the parent must know
            del model  # after the error, whose traceback holds the model
            self._let_go()
            return Cancelled(evicted=tuple(evicted))
        self[request.model] = model
        self.switched = None  # ComfyUI's import sets some
        self.switch_to(model)
        wait_for(self._device)
        keep_from_collections()
        empty_cache(self._device)
        return LoadReply(
            load_s=time.perf_counter() - began,
            parameter_bytes=model.weights.parameter_bytes,
            dtype=dtype_name(model.weights.dtype),
            evicted=tuple(evicted),
            imported=what_was_imported(),
            memory=self._memory(),
        )

    def _make_room(self, needed: int, *, order: Sequence[int], budget: int | None) -> list[int]:
        """Evict models in the given order until `needed` bytes fit; returns the handles of those evicted.

        One that does not fit with all others gone is loaded all the same: what the device says is the better error.
        """
        evicted = []
        for handle in order:
            held = sum(model.weights.device_bytes for model in self.values())
            if needed <= (free_bytes(self._device) if budget is None else budget - held):
                break
            if self.pop(handle, None) is not None:
                evicted.append(handle)
                self._let_go()
        return evicted

    def switch_to(self, model: HostedModel) -> None:
        """Have torch's switches as the model's file was loaded with; another model's, or a VAE's, may be set."""
        if self.switched is not model.weights.spec:
            self.switched = model.weights.spec
            set_flags(self.switched.flags)

    def end_runs(self, *, but: int | None = None) -> None:
        """Have no model keep anything of a sampling run, but the one of that handle."""
        for handle, model in self.items():
            if handle != but:
                model.end_run()

    @property
    def staying_bytes(self) -> int | None:
        """Bytes of blocks that stay whole; None where none does."""
        shards = (model.weights.shards for model in self.values())
        return sum(each.staying_bytes for each in shards if each is not None) or None

    def drop_whole_blocks(self, *, but: int | None = None) -> None:
        """Have no model keep whole blocks besides its part of them, but the one of that handle, which makes a step."""
        before = self.staying_bytes
        for handle, model in self.items():
            if handle != but:
                model.drop_whole_blocks(for_a_step=but is not None)
        if self.staying_bytes != before:
            empty_cache(self._device)

    @contextmanager
    def telling_of_whole_blocks(self) -> Iterator[None]:
        """Inside, an error while blocks stay whole says so: without them there may be memory."""
        try:
            yield
        except RuntimeError as error:
            if self.staying_bytes and not isinstance(error, RequestCancelledError):
                error.args = (f"{error} ({BESIDE_BLOCKS})", *error.args[1:])
            raise

    def drop(self, request: Unload) -> MemoryReply:
        """Free a model, if this rank has it."""
        self.pop(request.model, None)
        self._let_go()
        return MemoryReply(memory=self._memory())

    def change(
        self,
        request: ChangeWeights | SetStrengths,
        tensors: Mapping[str, torch.Tensor],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> MemoryReply:
        """Take one message of a change of weights."""
        model = self.get(request.model)  # a rank that the model's layout leaves out has nothing to change
        if isinstance(request, SetStrengths):
            changed = model is None or model.changes.set_strengths(request.strengths)
            return StrengthsReply(changed=changed, memory=self._memory())
        if model is not None:
            self.switch_to(model)
            model.changes.take(request, tensors, cancelled=cancelled, beat=beat)
            wait_for(self._device)  # it may still read the message's memory, which the next one takes
            if request.last:
                empty_cache(self._device)
        return MemoryReply(memory=self._memory())

    def give_back(self) -> None:
        """Memory kept for later goes back to the host and the device, where ComfyUI or another rank may want it."""
        give_back_heap()
        give_back_pinned(self._device)
        empty_cache(self._device)

    def _let_go(self) -> None:
        """Free a model that was dropped: a module of ComfyUI's and the hooks on it refer to each other."""
        gc.unfreeze()
        keep_from_collections()
        self.give_back()


def keep_from_collections() -> None:
    """Collect now, and have no later collection look at what is there.

    Of torch, ComfyUI and a model these are a million objects, which a collection of all takes 50 to 100 ms for: on one
    rank, while the others wait. Of what comes later Python makes one seldom by itself, and the engine one as a run
    begins or has ended; the smaller ones stay.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)
