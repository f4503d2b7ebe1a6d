"""Asks before a call of a hosted model whether its plan is proven with this ComfyUI, and has it proven if it is not.

Owns what a proof is kept by here (`ProofKey`), what a whole call needs of memory, and what the user is told. Does not
own the verdict (proof.py) nor which calls make it (pool/proving.py). A kind of call is looked up once a process; of a
plan that was found, each side of cfg is a kind, and numbers of 0, of 1 and between them are.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .... import parallel_runtime
from ....parallel_runtime.model_call import ModelCall
from ....parallel_runtime.models.hosted.block_hooks import OPTION
from ....parallel_runtime.models.hosted.build import Recognised
from ....parallel_runtime.models.hosted.calls import INSIDE, from_tree
from ....parallel_runtime.models.hosted.formats import coarse_inputs, formats_of
from ....parallel_runtime.models.specs import find_spec, spec_of
from ....parallel_runtime.plan import TOKEN_AXES, ParallelPlan
from ....parallel_runtime.planner.automatic import without_sharing
from ....parallel_runtime.planner.machine import kinds_here
from ....parallel_runtime.pool.calls import RunResult
from ....parallel_runtime.pool.proving import arguments_of, prove
from ....parallel_runtime.proof import (
    NOT_NEEDED,
    NOT_PROVEN,
    PROVEN,
    REFUSED,
    Proof,
    ProofKey,
    ProofStore,
)
from ....parallel_runtime.wire.protocol import dtype_name
from ..contract.version import comfyui_version
from ..model.forward import alive
from ..model.found_plans import LOOKING
from ..model.pooled_model import PooledModel
from ..panel.progress import NodeText
from ..sampling.run_context import RunContext

log = logging.getLogger(__name__)
SPARE = 0.8  # of what is free: ComfyUI's own figure for a whole call is an estimate
WHOLE = Proof(verdict=NOT_NEEDED, reason="the plan cuts no tokens, each rank runs ComfyUI's own module on whole calls")
STAGED = Proof(verdict=NOT_PROVEN, reason="no rank of a pipeline has all blocks to compute a whole call with")
# What every call of a class of ComfyUI's goes through.
EVERY_CALLS = ("comfy.ops", "comfy.ldm.modules.attention")
IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+(\S+)[ \t]+import[ \t]+([\w \t,]*)|import[ \t]+([\w.]+))", re.MULTILINE)
# What shares tokens here: a proof made with other code is not believed.
SHARING = ("models", "models/hosted", "models/specs", "parallel", "worker", "weights", "plan.py", "pool/proving.py")


class Prover:
    """What is known of the plans of one hosted model. `memory_required` is stock ComfyUI's, of a latent's shape."""

    def __init__(
        self,
        transformer: torch.nn.Module,
        recognised: Recognised,
        pooled: PooledModel,
        memory_required: Callable[[Sequence[int]], float],
    ) -> None:
        self._transformer, self.recognised, self.pooled = weakref.ref(transformer), recognised, pooled
        self.memory_required = memory_required
        self._kind = type(transformer)  # a node may put another class in its place, for which no plan was made
        self._name = self._kind.__name__
        self.num_computed = 0  # proofs, by this process
        self._known: dict[object, Proof] = {}
        self._told: set[str] = set()

    @property
    def transformer(self) -> torch.nn.Module:
        """ComfyUI's, without weights. It holds this, so that it is not held here."""
        return alive(self._transformer)

    @property
    def gone(self) -> bool:
        """Whether the MODEL is, of which nothing can be proven any more."""
        return self._transformer() is None

    def check(
        self, run: RunContext, call: ModelCall, check_cancelled: Callable[[], None], *, looks: bool = True
    ) -> None:
        """Have the call's plan proven, unless that is known, and note it in the run.

        Where that refuses a plan that was shipped or found with another kind of file, and `looks`, the plan of this
        kind takes its place for all MODELs on these weights, and is proven instead. The run goes on without a plan that
        auto took and that computes something else, or whose ranks raise. Raises `ValueError` for such a plan of the
        user's, `PoolError` when a worker fails.
        """
        if call.options["method"] is not None:
            return
        if run.plan.pipefusion > 1:
            proof = STAGED
        else:
            proof = WHOLE if run.whole or run.plan.parts == 1 else self._proof(run, call, check_cancelled)
        if proof.verdict == REFUSED and self.pooled.found_by and looks:
            proof = self._by_another_plan(run, call, check_cancelled, proof)
        fails = (REFUSED, NOT_PROVEN) if self.pooled.found_by else (REFUSED,)  # a found plan counts once it is proven
        if proof.verdict in fails and not run.decision.automatic:
            raise ValueError(self._refusal(run.plan, proof))
        if proof.verdict in fails:
            self._go_on_without(run, proof)
            proof = WHOLE
        run.note(proof)

    def _by_another_plan(
        self, run: RunContext, call: ModelCall, check_cancelled: Callable[[], None], refused: Proof
    ) -> Proof:
        """What is known once the plan of this kind of file has taken the place of the refused one."""
        pooled = self.pooled
        found = LOOKING.instead_of(self.transformer, self.recognised.kind, pooled.spec, check_cancelled)
        if found.spec is None:
            return replace(refused, reason=f"{refused.reason}; with this file {found.why}") if found.why else refused
        log.info("%s: another plan, found with this file, is used: %s", self._name, refused.reason)
        self._known.clear()
        progress = partial(NodeText().loading, os.path.basename(pooled.spec.path))
        pooled.take_plan(found, run.plan, run.deltas, progress=progress, check_cancelled=check_cancelled)
        proof = self._proof(run, call, check_cancelled)
        if proof.verdict != REFUSED:
            return proof
        return replace(proof, reason=f"{refused.reason}; by the plan that was found with this file: {proof.reason}")

    def knows(self, plan: ParallelPlan, call: ModelCall) -> bool:
        """Whether it is known what `check` would find of the plan, without a call of the model."""
        if plan.parts == 1 or call.options["method"] is not None:
            return True
        kind = (_told(plan), self._arguments(call))
        sizes = tuple(tensor.shape for tensor in call.tensors.values())
        found = self._known.get(kind) or self._known.get((kind, sizes)) or self._store.load(self.key(plan, kind[1]))
        return found is not None

    def _go_on_without(self, run: RunContext, proof: Proof) -> None:
        """Have the run go on under a plan that cuts no tokens, and say so: to the user each run, in the log once."""
        decision = without_sharing(run.decision, self.pooled.plan.ranks, guided=run.guided, images=run.images)
        lost = run.decision.gain_over(decision.plan)
        slower = "" if lost is None or lost <= 1 else f", predicted to take {lost:.1f} times as long"
        if decision.plan.parts == 1:
            how = f"where one device computes each image{slower}"
        else:  # the planner does not know it
            how = "as the weights lie, and each device computes each image whole, which takes as long as on one"
        text = (
            f"the proof of {run.plan.name} failed for {self._name} of ComfyUI {comfyui_version()} ({proof.reason}): "
            f"the run goes on with {decision.plan.name}, {how}; report this line"
        )
        run.fall_back(decision, text)
        if text not in self._told:
            self._told.add(text)
            log.warning(text)

    def told(self, plan: ParallelPlan) -> str:
        """What is known of a plan before anything runs, in a line."""
        if plan.pipefusion > 1:
            return STAGED.text
        if plan.parts == 1:
            return f"no proof needed: {WHOLE.reason}"
        verdicts = [proof.verdict for proof in self._store.of_any_call(self.key(plan, ()))]
        counts = [f"{verdicts.count(each)} {each}" for each in (PROVEN, NOT_PROVEN, REFUSED) if each in verdicts]
        known = f"kinds of calls so far: {', '.join(counts)}" if counts else "not done yet"
        told = f"{plan.name} is proven against one device before its first step, once for each kind of call; {known}"
        return f"found, proven: {self.pooled.found_by}; {told}" if self.pooled.found_by else told

    @property
    def _store(self) -> ProofStore:
        return ProofStore.of_user()

    def key(self, plan: ParallelPlan, arguments: tuple[str, ...]) -> ProofKey:
        """What a proof of such a call holds for."""
        spec, kind = self.pooled.spec, self._kind
        options = () if spec.comfyui is None else spec.comfyui.options
        kernel = self.pooled.rounding_attention  # Ring has an exact one in its place
        return ProofKey(
            comfyui=comfyui_version() or "unknown",
            pack=f"{parallel_runtime.VERSION} {_pack_source()}",
            model_class=f"{kind.__module__}.{kind.__qualname__}",
            source=self._source,
            plan=_told(plan),
            kernels=" ".join([*self._cards(), f"torch {torch.__version__}", *options]),
            weights=" ".join(filter(None, (spec.kept, f"{spec.dtype} of {', '.join(self._formats)}", kernel))),
            arguments=arguments,
        )

    def _cards(self) -> list[str]:
        """What computes: kernels are chosen by the card."""
        devices = self.pooled.devices
        machines = sorted({device.machine for device in devices if device.machine})
        return [*kinds_here(devices), *machines] if devices[0].kind == "cuda" else [devices[0].kind]

    def _arguments(self, call: ModelCall) -> tuple[str, ...]:
        """What a proof of the call holds for."""
        return arguments_of(call, closely=bool(self.pooled.found_by))

    def _proof(self, run: RunContext, call: ModelCall, check_cancelled: Callable[[], None]) -> Proof:
        arguments = self._arguments(call)
        kind = (_told(run.plan), arguments)
        sizes = tuple(tensor.shape for tensor in call.tensors.values())
        proof = self._known.get(kind) or self._known.get((kind, sizes))
        if proof is None:
            key = self.key(run.plan, arguments)
            proof = self._store.load(key)
            if proof is None:
                proof = self._proven(run, call, check_cancelled)
                if _is_judged(proof):
                    self._store.save(key, proof)
            # what was too large may be proven when a smaller one comes
            self._known[kind if _is_judged(proof) else (kind, sizes)] = proof
        return proof

    def _proven(self, run: RunContext, call: ModelCall, check_cancelled: Callable[[], None]) -> Proof:
        NodeText().say(f"proving once that {run.plan.name} computes what one device does")
        self.num_computed += 1

        def ask(calls: Sequence[ModelCall]) -> RunResult:
            spec, deltas = self.pooled.spec, run.deltas
            return self.pooled.pool.run(spec, run.plan, calls, deltas=deltas, check_cancelled=check_cancelled)

        free = [each.free_bytes for each in self.pooled.pool.measure_devices(check_cancelled)][: run.plan.ranks]
        proof = prove(
            ask,
            call,
            self.pooled.spec.dtype,
            room=lambda each: self._room(each, free),
            possible=self._possible,
            retract=self.pooled.pool.retract_failure,
            coarse=coarse_inputs(self.recognised.config, self.recognised.weights, self.pooled.spec.kept),
            keeps=self.pooled.keeps_state,
            two_sizes=bool(self.pooled.found_by),
        )
        level, name = logging.INFO if proof.verdict != NOT_PROVEN else logging.WARNING, run.plan.name
        log.log(level, "%s under %s is %s (%d calls, %.1f s)", self._name, name, proof.text, proof.calls, proof.seconds)
        return proof

    def _room(self, call: ModelCall, free: Sequence[int]) -> float:
        """Bytes that a device has, over those of one whole call; ranks on the CPU share its memory."""
        x = _first(_given(call))
        ranks = len(free) if self.pooled.devices[0].kind == "cpu" else 1
        return SPARE * min(free) / max(1.0, ranks * self.memory_required(list(x.shape)))

    def _possible(self, call: ModelCall) -> bool:
        """Whether the class takes such a call and makes as many numbers as expected of it: tried without values."""
        given: Any = from_tree(call.options["call"], [tensor.to("meta") for tensor in call.tensors.values()])
        if OPTION in given["kwargs"]["transformer_options"]:  # pictures are encoded for the latent's size
            return False
        plan = find_spec(self.transformer)
        if plan is not None and plan.keeps is not None and self.pooled.keeps_state:  # it would compare values
            getattr(self.transformer, plan.keeps.reset)(False)
        try:
            with torch.no_grad():
                kind: Any = type(self.transformer)
                function = kind._forward if call.options.get(INSIDE) else kind.forward
                out: Any = function(self.transformer, *given["args"], **given["kwargs"])
        except Exception as error:  # noqa: BLE001  any code of ComfyUI's, which may also need the values
            log.info("a smaller latent cannot be tried with these inputs: %s", error)
            return False
        outs = [out] if isinstance(out, torch.Tensor) else out
        return sum(each.numel() for each in outs) == torch.Size(call.out_shape).numel()

    def _refusal(self, plan: ParallelPlan, proof: Proof) -> str:
        whose = "the plan that was found" if self.pooled.found_by else "the pack's plan"
        return (
            f"{plan.describe()} is refused for {self._name} of ComfyUI {comfyui_version()}: "
            f"{proof.reason}; in SP Config, mode manual with ulysses=1 and ring=1 (cfg and data cut no tokens), and "
            f"report this line: {whose} does not fit this ComfyUI"
        )

    @property
    def _source(self) -> str:
        return f"{self._classes} {_hash([], repr(spec_of(self.transformer, made_as=self._kind)))}"

    @functools.cached_property
    def _classes(self) -> str:
        return _hash(_files_of({type(each) for each in self.transformer.modules()}))

    @functools.cached_property
    def _formats(self) -> list[str]:
        """The dtypes of the file's weights, and the formats that ComfyUI packs weights into."""
        found = {dtype_name(each.dtype) for each in self.recognised.weights.values()}
        return sorted(found | formats_of(self.recognised.weights))


def _told(plan: ParallelPlan) -> str:
    """What of a plan cuts tokens, and how weights lie, as a proof is kept by."""
    shares = plan.shares[: plan.parts] if plan.batch_groups == 1 else plan.shares
    shares = () if plan.pipefusion > 1 else shares  # of stages, each of which shares its tokens equally
    cut = ParallelPlan(**{axis: getattr(plan, axis) for axis in TOKEN_AXES}, weights=plan.weights).describe()
    return f"{cut},shares={':'.join(map(str, shares))}" if shares else cut


def _is_judged(proof: Proof) -> bool:
    return proof.error is not None or proof.verdict == REFUSED


def _given(call: ModelCall) -> Any:  # noqa: ANN401  the call's arguments
    return from_tree(call.options["call"], list(call.tensors.values()))


def _first(given: Any) -> torch.Tensor:  # noqa: ANN401  the call's arguments
    """The latent, of several the first."""
    x = given["args"][0]
    return x if isinstance(x, torch.Tensor) else x[0]


@functools.cache
def _pack_source() -> str:
    root = Path(parallel_runtime.__file__).parent
    places = [root / name for name in SHARING]
    return _hash(str(file) for place in places for file in ([place] if place.is_file() else place.glob("*.py")))


def _files_of(kinds: Iterable[type]) -> list[str]:
    """The files of ComfyUI's that compute classes: theirs, their bases', and what those import of `comfy.ldm`."""
    due = [*EVERY_CALLS, *{base.__module__ for kind in kinds for base in kind.__mro__}]
    found: dict[str, str] = {}
    for name in due:  # grows meanwhile
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in found and name.partition(".")[0] == "comfy" and file is not None:
            found[name] = file
            stat = os.stat(file)
            package = sys.modules[name].__package__ or ""
            due += [each for each in _imports(file, stat.st_mtime_ns, stat.st_size, package) if each in sys.modules]
    return list(found.values())


@functools.cache
def _imports(file: str, _changed_ns: int, _size: int, package: str) -> list[str]:
    """What a file names of `comfy.ldm` where it imports, as it was then; what is no module too."""
    found = []
    for source, names, module in IMPORTS.findall(Path(file).read_text(encoding="utf-8")):
        path = importlib.util.resolve_name(source, package) if source else module
        found += [path, *(f"{path}.{each.split()[0]}" for each in names.split(",") if each.split())]
    return [each for each in found if each.startswith("comfy.ldm.")]


@functools.cache
def _digest(file: str, _changed_ns: int, _size: int) -> bytes:
    """Of a file as it was then."""
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _hash(files: Iterable[str | None], more: str = "") -> str:
    """Of what is in the files, in the order of their names, and of a text."""
    found = hashlib.sha256(more.encode())
    for file in sorted(filter(None, files)):
        stat = os.stat(file)
        found.update(_digest(file, stat.st_mtime_ns, stat.st_size))
    return found.hexdigest()[:16]
