"""ComfyUI's handle on a parallel MODEL: its memory manager's load, unload and free become calls to the pool.

Owns when weights enter and leave the workers, what a sampling run's context is made of, and the refusal of nodes that
would change weights. A pool cannot hold half a model, so every partial request is answered in full. What a later
ComfyUI gives its methods more (`more`, `named`) is handed to ComfyUI's own.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet, finalize, ref

import torch

from ....parallel_runtime.exchange_formats import EXACT
from ....parallel_runtime.models.hosted.stock_attention import title_of
from ....parallel_runtime.plan import Layout, ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.work import Work
from ....parallel_runtime.torch_flags import read_flags, set_flags
from ....parallel_runtime.weight_delta import PRISTINE, WeightDeltas
from ....parallel_runtime.wire.protocol import dtype_name
from ..contract.comfyui import CallbacksMP, WeightHook, check_cancelled, comfy
from ..contract.refusals import (
    COMPILED,
    COMPILES,
    COPIES,
    INSTEAD,
    Refusal,
    block_patches,
    check_transformer_options,
    is_attention,
    is_compiled,
    is_of_transformer,
    refuse_by,
    refuse_value,
    refused_here,
)
from ..contract.version import off
from ..contract.writers import (
    GraphNode,
    Written,
    changers_of_models,
    executing_node,
    nodes_of,
    values_in,
    writers_of,
)
from ..panel.progress import NodeText, StepText
from ..sampling.run_context import Recorder, RunContext
from .block_hooks import hook_models, hook_weights
from .changed_modules import AROUND_CALLS, as_it_was, have_packs_around, num_taken_back, refuse_changed
from .measures import held_beyond_room, held_by_memory, measured_shares, refuse_beyond_room, unequal
from .pools import POOLS
from .stand_in import RemoteModel
from .stock_functions import registered_name
from .weight_deltas import attention_left_out, delta_set, refuse_misfit

log = logging.getLogger(__name__)
FP16_ACCUMULATION = "start ComfyUI with --fast fp16_accumulation"
ELSEWHERE = 10**28  # bytes: more than any device has, and less than the 1e30 by which ComfyUI unloads all models
HOOKS = ("CreateHookLora", "CreateHookLoraModelOnly", "CreateHookModelAsLora", "CreateHookModelAsLoraModelOnly")


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher around a model without weights. Constructed and cloned as ComfyUI does."""

    model: RemoteModel

    def __init__(self, model: RemoteModel, *where: object, **settings: object) -> None:
        super().__init__(model, *where, **settings)
        self.decision = Decision(plan=model.pooled.plan)
        self.choose_again: Callable[[Work], Decision] | None = None
        self.advise: Callable[[RemotePatcher, Mapping[str, object]], dict | None] | None = None
        self.recorder: Recorder | None = None
        self.side_branch = self.compiled = False
        self.step_cache = 0.0
        self.attention = ""  # a kernel of a package, by its name
        self.exchange = EXACT  # as what heads travel between ranks
        self.worker_loop = True  # samplers run their loop there where they can
        self.tries = False  # whether plans are tried before a run
        self.shares: tuple[int, ...] | None = ()  # of each device; () for equal ones, None as they are measured
        self.memory_text = ""  # what a device needs, for people
        self.left_out = ""  # what was said last of changes that do not fit
        self._kernels: set[str] | None = None  # that a LoRA asks for to attend by, while it is added
        self.origin = object()  # the node that made the MODEL, of which clones are
        self.refused: tuple[Refusal, ...] = ()  # what nodes were refused, also those that went on
        self.clones = WeakSet["RemotePatcher"]()  # of a root, those that are alive
        self._made_by, self._written = executing_node(), Written()
        self._packs: tuple[tuple[GraphNode, int], ...] = ()  # it comes from, as `refuse_changed` takes them

    @property
    def plan(self) -> ParallelPlan:
        """What the weights are loaded for, and what runs unless something else is chosen for a run."""
        return self.decision.plan

    def clone(self, *args: object, **kwargs: object) -> "RemotePatcher":
        """As ComfyUI's; the plan belongs to the clone, the weights to all of them.

        When a clone goes, ComfyUI's manager follows `parent` to know the weights by. The root is what stays longest.
        """
        copy = super().clone(*args, **kwargs)
        copy.parent = self.parent or self
        copy.parent.clones.add(copy)
        copy.decision, copy.choose_again, copy.advise = self.decision, self.choose_again, self.advise
        copy.side_branch, copy.compiled, copy.recorder = self.side_branch, self.compiled, self.recorder
        copy.origin, copy.step_cache, copy.memory_text = self.origin, self.step_cache, self.memory_text
        copy.attention, copy.exchange = self.attention, self.exchange
        copy.worker_loop, copy.tries, copy.shares = self.worker_loop, self.tries, self.shares
        copy.refused, copy._written, copy._packs = self.refused, self.written(), self._packs
        if (node := copy._made_by) is not None and not node.ours and not node.stock:
            copy._packs = (*self._packs, (node, num_taken_back(self.model)))
        return copy

    def written(self) -> Written:
        """What nodes wrote into the MODEL, with the node that did: of what is new in a copy, the one that made it."""
        carried = [self.model_options, self.wrappers, self.injections, self.weight_wrapper_patches]
        return self._written.after(values_in(carried), self._made_by)

    def under(self, decision: Decision) -> "RemotePatcher":
        """The same MODEL with this plan in all of its runs. Its weights have to serve it."""
        copy = self.clone()
        copy.decision, copy.choose_again = decision, None
        return copy

    def decision_for(self, work: Work | None) -> Decision:
        """The plan of a run of `work`, chosen once for each work; the MODEL's own where there is nothing to choose."""
        return self.decision if self.choose_again is None or work is None else self.choose_again(work)

    def shares_of_run(self) -> tuple[int, ...]:
        """How much each device computes in a run that begins; () for equal ones. May start the workers to measure."""
        if self.shares is None:
            return self.model.corrected.now or measured_shares(self.model.pooled.devices, check_cancelled)
        return self.shares

    def advice(self, settings: Mapping[str, object]) -> dict | None:
        """The plan that the planner would rather have for a run with KSampler's inputs; None where it has none."""
        return None if self.advise is None else self.advise(self, settings)

    def told_of_proof(self) -> list[str]:
        """What is known of the MODEL's plan with this ComfyUI, a line."""
        return [self.model.prover.told(self.plan)]

    def new_run(self, decision: Decision) -> RunContext:
        """The context of a sampling run that begins under this plan. Raises `ValueError` for patches of its blocks."""
        self._check_carried()
        return RunContext(
            model=self.model.pooled,
            decision=decision,
            deltas=self.delta_set(),
            compiled=self.compiled,
            listener=StepText(decision),
            recorder=self.recorder,
            step_cache=self.step_cache,
            attention=self.attention,
            exchange=self.exchange,
            prover=self.model.prover,
            wrapped="model_function_wrapper" in self.model_options,
            packs_around=have_packs_around(self.model_options, AROUND_CALLS),
            stock_cache="easycache" in self.model_options["transformer_options"],
            written=self.written(),
        )

    # What ComfyUI's memory manager asks

    def model_size(self, *more: object, **named: object) -> int:
        """Bytes that ranks keep on the device ComfyUI loads models to, also those of a plan of more ranks; or that ours
        would keep there."""
        pooled, layout = self.model.pooled, self.model.pooled.held_layout(self.plan)
        if layout is None or not layout.serves(self.plan.layout):
            shared = self.plan.with_shares(self.shares or ())
            by_memory = held_by_memory(shared, pooled.devices, pooled.sizes.total) if self.shares is None else shared
            layout = by_memory.layout
        return self._bytes_here(layout)

    def loaded_size(self, *more: object, **named: object) -> int:
        """Bytes that ranks keep there, on however many ranks; 0 after the weights were freed, or the workers died.

        `ELSEWHERE` for weights that are all on other devices: where ComfyUI needs memory it then asks for a part of it
        (`partially_unload`); it would detach a model that is smaller than what it needs.
        """
        layout = self.model.pooled.held_layout(self.plan)
        return 0 if layout is None else self._bytes_here(layout) or ELSEWHERE

    def current_loaded_device(self, *more: object, **named: object) -> torch.device | None:
        """As ComfyUI's; None where the weights are all elsewhere, so that it counts `model_size` alone."""
        return None if self.loaded_size() == ELSEWHERE else super().current_loaded_device(*more, **named)

    def partially_load(
        self,
        device_to: torch.device,
        extra_memory: float = 0,
        force_patch_weights: bool = False,
        *more: object,
        **named: object,
    ) -> int:
        """Load everything, whatever part of it ComfyUI has room for. Returns the bytes that came in: none while a step
        computes with them, as where its callback loads the models of the run again."""
        if self.model.pooled.in_callback:
            return 0
        self._check_remote()
        before = self.model.pooled.holds(self.plan)
        self.unpatch_model(self.offload_device, unpatch_weights=False)
        self.patch_model(load_weights=False)
        try:
            self.load(device_to, force_patch_weights=force_patch_weights, full_load=True)
        except BaseException:
            self.list_again()
            raise
        return 0 if before else self.model_size()

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        *more: object,
        **named: object,
    ) -> None:
        """Have the weights in the workers. Raises `PoolError`, or ComfyUI's interrupt when the user cancels."""
        self._ensure_pooled()
        deltas = self.delta_set()
        self.model.take_shapes(deltas)
        self.model.diffusion_model.outside_runs = RunContext(
            model=self.model.pooled,
            decision=self.decision,
            deltas=deltas,
            compiled=self.compiled,
            prover=self.model.prover,
            wrapped="model_function_wrapper" in self.model_options,
            packs_around=have_packs_around(self.model_options, AROUND_CALLS),
        )
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.model_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def unpatch_model(
        self, device_to: torch.device | None = None, unpatch_weights: bool = True, *more: object, **named: object
    ) -> None:
        """Take back object patches; with `unpatch_weights`, the weights leave the workers too. Nothing while a step
        computes with them, as where its preview loads a model."""
        if self.model.pooled.in_callback:
            return
        super().unpatch_model(None, False, *more, **named)
        if unpatch_weights:
            self.model.pooled.unload(self.plan)
            if not (self.parent or self).clones:  # no MODEL is left: a LoRA's tensors go as well
                outside = self.model.diffusion_model.outside_runs
                self.model.diffusion_model.outside_runs = replace(outside, deltas=PRISTINE)
                self.model.last_run = None
            self.model.device = device_to or self.offload_device
            self.model.model_loaded_weight_memory = 0
            self.model.current_weight_patches_uuid = None

    def partially_unload(
        self,
        device_to: torch.device,
        memory_to_free: float = 0,
        force_patch_weights: bool = False,
        *more: object,
        **named: object,
    ) -> float:
        """Free everything, whatever part of it ComfyUI needs; nothing where the weights are all on other devices, or
        compute a step, which ComfyUI is told as if that were enough. Returns the bytes that left."""
        freed = self.loaded_size()
        if freed == ELSEWHERE or self.model.pooled.in_callback:
            return memory_to_free
        self.unpatch_model(device_to)
        return freed

    def get_free_memory(self, device: torch.device, *more: object, **named: object) -> int:
        """As ComfyUI's, which asks in each step whether prompt and negative fit in one call: what ranks on its GPU only
        keep for later is free for their next call, as what ComfyUI keeps is for its own."""
        free: int = super().get_free_memory(device, *more, **named)
        return free + self.model.pooled.cached_on(device)

    def _bytes_here(self, layout: Layout) -> int:
        """Bytes that ranks of this layout keep on the device ComfyUI loads models to."""
        pooled, options = self.model.pooled, self.model_options["transformer_options"]
        beside = sum(each.num_bytes for each in hook_weights(options)) * pooled.ranks_on(self.load_device, self.plan)
        return pooled.bytes_on(self.load_device, layout) + beside

    def list_again(self) -> None:
        """After a run or an error: have ComfyUI's manager know the MODEL where its weights are in the workers.

        The manager takes the models of a run off its list, and puts them back only once all of them are loaded.
        """
        if off("listed"):
            return
        management = comfy.model_management
        listed = management.current_loaded_models
        known = any(each.model is not None and self.is_clone(each.model) for each in listed)
        if known or self.model.pooled.held_layout(self.plan) is None:
            return
        entry = management.LoadedModel(self)
        entry.real_model = ref(self.model)
        entry.model_finalizer = finalize(self.model, management.cleanup_models)
        entry.model_finalizer.atexit = False
        listed[:0] = [entry]

    def delta_set(self) -> WeightDeltas:
        """The patches as the workers take them."""
        return delta_set(
            self.patches,
            self.patches_uuid,
            shape_of=self.model.shape_of,
            side_branch=self.side_branch,
            hook_weights=hook_weights(self.model_options["transformer_options"]),
        )

    def note_kernels(self) -> None:
        """Until `tell_misfits`: leave out attention functions that a LoRA would have layers attend by, to be told."""
        self._kernels = set()

    def tell_misfits(self, patches: Mapping[str, Sequence[tuple]], before: Mapping[str, int]) -> None:
        """Say on the node that executes how many of the patches behind the first `before` of each weight are left out,
        as they do not fit it, and what else of them. Raises `ValueError` where none fits, and for what cannot travel.
        """
        kernels, self._kernels = self._kernels or (), None
        told = attention_left_out(kernels), refuse_misfit(patches, before, self.model.shape_of)
        self.left_out = "; ".join(filter(None, told))
        if self.left_out:
            NodeText().say(self.left_out)
            log.warning("%s: %s", os.path.basename(self.model.pooled.spec.path), self.left_out)

    def model_patches_models(self, *more: object, **named: object) -> list:
        """As ComfyUI's, which loads them here, without those that ranks rebuild."""
        here = {id(each) for each in hook_models(self.model_options["transformer_options"])}
        return [each for each in super().model_patches_models(*more, **named) if id(each) not in here]

    def pre_run(self, *more: object, **named: object) -> None:
        """As ComfyUI's, before the first step; refuses what came into the options without asking the methods below, and
        callbacks that set torch's switches for the run: ranks have those of when the MODEL was made."""
        self._check_carried()
        before = read_flags()
        super().pre_run(*more, **named)
        refuse_changed(as_it_was(self.model, self._packs), deep=True)  # what a callback did for the time of the run
        changed = [name for name, value in read_flags().items() if before.get(name) != value]
        if changed:
            set_flags(before)
            callbacks = self.get_all_callbacks(CallbacksMP.ON_PRE_RUN)
            nodes = [node for each in callbacks for node in writers_of(each)] or changers_of_models()
            fp16 = all(name.endswith("fp16_accumulation") for name in changed)
            raise refuse_by(nodes, f"it sets {', '.join(changed)} for a run", FP16_ACCUMULATION if fp16 else INSTEAD)

    def cleanup(self, *more: object, **named: object) -> None:
        """After a sampling run: what follows, a VAE above all, finds the memory that ranks on ComfyUI's GPU cached."""
        super().cleanup(*more, **named)
        self.list_again()  # a step's callback may have had the manager take it off
        self.model.pooled.give_back(self.load_device, graphs=True)

    # What other nodes ask, and a MODEL without weights here cannot give. Raised while that node executes.

    def add_patches(
        self,
        patches: dict,
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
        *more: object,
        **named: object,
    ) -> list:
        """As ComfyUI's; refused here, at the node that adds them, when they are of a kind the workers cannot merge, or
        none fits. That node says how many do not."""
        before = {name: len(entries) for name, entries in self.patches.items()}
        self.note_kernels()
        try:
            applied = super().add_patches(patches, strength_patch, strength_model, *more, **named)
        except BaseException:
            self._kernels = None
            raise
        names = {name if isinstance(name, str) else name[0] for name in applied}  # a tuple where only rows are changed
        # what a LoRA asks for to attend by is among what was applied, and no patch of a weight
        self.tell_misfits({name: self.patches[name] for name in sorted(names & self.patches.keys())}, before)
        return applied

    def add_hook_patches(
        self,
        hook: WeightHook,
        patches: dict,
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
        *more: object,
        **named: object,
    ) -> list:
        """Refused when any of `patches`, at a strength but 0, names a weight that the ranks hold."""
        patches = patches if strength_patch else {}  # 0 where a LoRA is for the text encoder alone
        applied = super().add_hook_patches(hook, patches, strength_patch, strength_model, *more, **named)
        if applied:
            raise refuse_by(nodes_of(*HOOKS), "it changes weights by a hook of a conditioning")
        return applied

    def add_weight_wrapper(self, name: str, function: object, *more: object, **named: object) -> None:
        """Refused."""
        raise self._refuse("it wraps weights")

    def add_wrapper_with_key(
        self, wrapper_type: str, key: str, wrapper: Callable, *more: object, **named: object
    ) -> None:
        """Refused for ComfyUI's compiled transformer, which is not here to be compiled; others run in this process."""
        if key == COMPILED:
            raise self._refuse(*COMPILES)
        super().add_wrapper_with_key(wrapper_type, key, wrapper, *more, **named)

    def set_injections(self, key: str, injections: list, *more: object, **named: object) -> None:
        """Refused: an injection swaps modules of the model."""
        raise self._refuse(f"it injects modules into the model ({key})")

    def set_model_optimized_attention(self, optimized_attention: object, *more: object, **named: object) -> None:
        """As ComfyUI's since 0.33 for a function that ComfyUI registers, as ranks have it too; refused for others."""
        if not registered_name(optimized_attention):
            raise self._refuse("it replaces the model's attention function")
        super().set_model_optimized_attention(optimized_attention, *more, **named)

    def set_model_patch(self, patch: object, name: str, *more: object, **named: object) -> None:
        """Refused when the patch would run inside the blocks."""
        super().set_model_patch(patch, name, *more, **named)
        self._refuse_block_patches()

    def set_model_patch_replace(
        self,
        patch: object,
        name: str,
        block_name: str,
        number: int,
        transformer_index: int | None = None,
        *more: object,
        **named: object,
    ) -> None:
        """Refused when the patch would replace a block."""
        super().set_model_patch_replace(patch, name, block_name, number, transformer_index, *more, **named)
        self._refuse_block_patches()

    def add_object_patch(self, name: str, obj: object, *more: object, **named: object) -> None:
        """Refused for parts of the transformer, but for the function that a LoRA would have a layer attend by."""
        if is_of_transformer(name):
            if is_attention(obj) and self._kernels is not None:
                self._kernels |= {title_of(obj.function)} if obj.function is not None else set()
                return
            raise self._refuse(*COMPILES) if is_compiled(obj) else self._refuse(f"it replaces {name}")
        super().add_object_patch(name, obj, *more, **named)

    def set_model_compute_dtype(self, dtype: torch.dtype | None, *more: object, **named: object) -> None:
        """Refused when it differs from what the workers compute in: what the MODEL was made with, by either node."""
        held = self.model_dtype()
        if dtype not in (None, held):
            asked, held = (dtype_name(each) for each in (dtype, held))
            raise self._refuse(
                f"it sets the compute dtype to {asked} where the workers compute in {held}",
                "set weight_dtype in Parallel Model Loader, or put it before Parallelize Model",
            )

    def get_key_patches(self, filter_prefix: str | None = None, *more: object, **named: object) -> dict:
        """Refused: merging reads weights."""
        raise self._refuse("it reads the model's weights")

    def patch_weight_to_device(self, key: str, *others: object, **more: object) -> torch.Tensor:
        """Refused: Extract and Save Lora reads weights by it. Workers patch their own weights."""
        raise self._refuse("it reads the model's weights")

    def model_state_dict_for_saving(self, *others: object, **more: object) -> dict:
        """Refused: saving reads weights."""
        raise self._refuse("it saves the model's weights")

    def deepclone_multigpu(self, *args: object, **kwargs: object) -> "RemotePatcher":
        """Refused: ComfyUI's own split over devices copies weights."""
        raise self._refuse(*COPIES)

    def _plan_of_load(self) -> ParallelPlan:
        """The plan by which weights are loaded: stages and sharded bytes by the devices' shares, which are those of the
        first load until the weights are loaded anew. Measured ones are of speed for stages, of memory for bytes."""
        layout, pooled = self.plan.layout, self.model.pooled
        if layout.shards == 1 and layout.stages == 1:
            return self.plan.with_shares(self.shares or ())
        if self.shares is not None:
            refuse_beyond_room(self.plan, pooled.devices, self.shares, pooled.sizes.total)
            return self.plan.with_shares(self.shares)
        if layout.stages == 1:
            return held_by_memory(self.plan, pooled.devices, pooled.sizes.total)
        plan = self.plan.with_shares(self.shares_of_run())
        if not held_beyond_room(plan, pooled.devices, pooled.sizes.total):
            return plan
        log.warning("%s: a device has no room for its share of the weights, so their parts are equal", plan.name)
        return self.plan

    def _loads(self) -> bool:
        """Whether weights are to be loaded: they are not there, or were cut by other shares of SP Config; those leave
        the workers now. Measured shares that a run corrected are no others: the weights stay as they were cut."""
        pooled = self.model.pooled
        held = pooled.holds(self.plan)
        stay = held and (POOLS.is_cut_by(pooled.weights, self.shares) or pooled.holds_cut(self._plan_of_load()))
        if held and not stay:
            pooled.unload(self.plan)
        return not stay

    def _ensure_pooled(self) -> None:
        """Have the workers hold the weights with our patches, and tell the node when that means loading."""
        pooled, text = self.model.pooled, NodeText()
        name, devices = os.path.basename(pooled.spec.path), ", ".join(map(str, pooled.devices[: self.plan.ranks]))
        loads, before = self._loads(), pooled.measured
        if loads:
            log.info("loading %s into the workers on %s", name, devices)
            text.say(f"Loading {name}" if pooled.started else f"Starting workers on {devices}")
        rank_load_s = pooled.ensure(
            self._plan_of_load() if loads else self.plan,
            self.delta_set(),
            progress=partial(text.loading, name),
            check_cancelled=check_cancelled,
        )
        POOLS.note_cut(pooled.weights, self.shares)
        if self.recorder is not None:
            self.recorder.rank_load_s.update(rank_load_s)
        if loads:
            warnings = (
                unequal(pooled.devices, pooled.measured[: self.plan.ranks]) if pooled.measured is not before else []
            )
            for warning in warnings:
                log.warning(warning)
            text.say("\n".join([f"{name} is in the workers on {devices}", *warnings]))

    def _refuse_block_patches(self) -> None:
        found = block_patches(self.model_options["transformer_options"])
        if found:
            names = dict.fromkeys(name for name, _ in found)
            raise self._refuse(f"it patches the model's blocks ({', '.join(names)})")

    def _refuse(self, what: str, instead: str = INSTEAD) -> ValueError:
        """The error for what the node that executes now asks for, which it may catch: so it is noted, too."""
        refusal = refused_here(what, instead)
        self.refused = (*(each for each in self.refused if each != refusal), refusal)
        log.warning("%s", refusal)
        NodeText().say(str(refusal))
        return ValueError(str(refusal))

    def _check_carried(self) -> None:
        """Raise `ValueError` for what nodes were refused and went on, and for patches of blocks."""
        for refusal in self.refused:
            if refusal.holds:
                raise ValueError(str(refusal))
        check_transformer_options(self.model_options["transformer_options"], written=self.written())
        refuse_changed(as_it_was(self.model, self._packs), deep=True, made_by=self._packs)

    def _check_remote(self) -> None:
        """What got in without asking the methods above."""
        for wrapper in values_in(self.weight_wrapper_patches):
            raise refuse_value(wrapper, "it wraps weights", written=self.written())
        for key, injections in self.injections.items():
            for injection in injections:
                raise refuse_value(injection, f"it injects modules into the model ({key})", written=self.written())
