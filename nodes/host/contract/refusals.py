"""What cannot run in workers that hold the weights elsewhere, and how we say so.

Owns the list of such things and their messages: the first line names the node to remove. Checks only, changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....parallel_runtime.models.hosted.calls import CannotTravelError
from ....parallel_runtime.models.hosted.stock_functions import OVERRIDE, why_not_skipped
from ..model.block_hooks import is_rebuilt
from ..model.stock_functions import is_skip, named_override, skipped
from .comfyui import comfy, is_absent
from .known_nodes import INSTEAD, instead_of
from .writers import (
    GraphNode,
    Written,
    appliers_of_controlnets,
    around,
    changers_of_models,
    defining_class,
    executing_node,
    still_there,
    writers_of,
)

COMPILED = "torch.compile"  # the key of ComfyUI's own wrapper, in every version that has it
COMPILES = ("it compiles the transformer in this process", "set compiled=blocks in SP Config")
COPIES = ("it copies the model to other devices", "name those devices in SP Config")
# Stock nodes whose functions replace blocks at some steps of a run; the second's, for the negative conditioning alone.
SKIP_LAYERS, SKIP_LAYERS_OF_NEGATIVE = "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple"
LAYERS = {"double_layers": "double_block", "single_layers": "single_block"}
# ControlNets that compute with the model's own weights, where this ComfyUI has them, and with which.
WITH_OUR_WEIGHTS = {
    kind: what
    for name, what in (("QwenFunControlNet", "own first layers"), ("ControlLora", "own weights"))
    if not is_absent(kind := getattr(comfy.controlnet, name))
}
# Under which of ComfyUI's `transformer_options` there is what would run inside the blocks: without them, nothing.
INSIDE_BLOCKS = frozenset(("patches", "patches_replace", OVERRIDE))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a node asked of a MODEL that it cannot take, or wrote into it; one of `nodes` did, where several are named.

    `what` goes on about the node: "it wraps weights". `instead` is what to do if the node is to stay.
    """

    nodes: tuple[GraphNode, ...]
    what: str
    instead: str = INSTEAD

    def __str__(self) -> str:
        """The sentence that a user reads."""
        reason = f"{_named(self.nodes)}: {self.what}, which a parallel MODEL cannot take"
        known = instead_of(node.class_type for node in self.nodes) if self.instead == INSTEAD else self.instead
        return f"{reason}; remove that node, or {known}"

    @property
    def holds(self) -> bool:
        """Whether what executes now depends on the node that asked, as it is set now."""
        return all(still_there(node) for node in self.nodes)


def refused_here(what: str, instead: str = INSTEAD) -> Refusal:
    """The refusal of `what` the node that executes now asks for."""
    return Refusal(nodes=tuple(filter(None, [executing_node()])), what=what, instead=instead)


def refuse_by(nodes: Iterable[GraphNode], what: str, instead: str = INSTEAD) -> ValueError:
    """The error for `what` one of these nodes did."""
    return ValueError(str(Refusal(nodes=tuple(dict.fromkeys(nodes)), what=what, instead=instead)))


def refuse_value(value: object, what: str, written: Written | None = None) -> ValueError:
    """The error for `what` a value in a MODEL does; it is said of the node that wrote it."""
    return refuse_by(writers_of(value, written) or changers_of_models(), what)


def refuse_added(error: CannotTravelError, written: Written | None) -> ValueError:
    """The error for a value of a call that cannot travel; it names the node that wrote it, if that is known."""
    nodes = writers_of(error.value, written)
    what = f"it adds {error.path}, a {type(error.value).__name__}"
    return refuse_by(nodes, what) if nodes else ValueError(str(error))


def refuse_in(source: str, what: str, instead: str = INSTEAD) -> ValueError:
    """The error for `what` found in a MODEL or a conditioning, made by nodes such as `source`."""
    return ValueError(f"{what}, which a parallel MODEL cannot take; remove {source}, or {instead}")


def block_patches(options: Mapping[str, dict]) -> list[tuple[str, object]]:
    """What in ComfyUI's `transformer_options` would run inside the blocks, with its name; empty when nothing would.

    Patches that ranks rebuild, and stock's functions that they have themselves, are left out.
    """
    patches = options.get("patches", {})
    found = [(name, patch) for name, several in patches.items() for patch in several if not is_rebuilt(patch)]
    for name, replaced in options.get("patches_replace", {}).items():
        where = "" if name == "dit" else f"{name} of "
        here = name == "dit"
        found += [
            (f"{where}{kind} {index}", patch)
            for (kind, index, *_), patch in replaced.items()
            if not (here and is_skip(patch))
        ]
    override = options.get(OVERRIDE)
    return found if override is None or named_override(override) else [*found, (OVERRIDE, override)]


def check_transformer_options(options: Mapping[str, dict], written: Written | None = None) -> None:
    """Raise `ValueError` when `options` hold anything that would run inside the blocks.

    Each node that wrote some of it has a line of the message.
    """
    found: dict[tuple[GraphNode, ...], list[str]] = {}
    for name, value in block_patches(options):
        nodes = tuple(writers_of(value, written) or changers_of_models())
        if name not in (names := found.setdefault(nodes, [])):
            names.append(name)
    if found:
        raise ValueError("\n".join(str(Refusal(nodes=nodes, what=_patches(names))) for nodes, names in found.items()))


def _patches(names: Sequence[str]) -> str:
    return f"it patches the model's blocks ({', '.join(names)})"


def check_skipping(kind: type, options: Mapping[str, dict], written: Written | None) -> None:
    """Raise `ValueError` where a call has blocks skipped and ranks cannot do so in a transformer of this class."""
    if (blocks := skipped(options)) and why_not_skipped(kind):
        (first, *_) = options["patches_replace"]["dit"].values()
        raise refuse_value(first, _skips([f"{block} {number}" for block, number in blocks], kind), written=written)


def check_skipped_layers(kind: type, written: Written, sigmas: Sequence[float], *, guided: bool) -> None:
    """Raise `ValueError` for Skip Layer Guidance at some of these steps, where ranks cannot skip blocks of this class.

    `guided`: the negative conditioning is computed. Stock's nodes keep strength, range and layers in the variables
    around their function. What cannot be foreseen is refused when it comes, by `check_skipping`.
    """
    if not why_not_skipped(kind):
        return
    for value in written.values():
        name = defining_class(value)
        if name != SKIP_LAYERS and not (guided and name == SKIP_LAYERS_OF_NEGATIVE):
            continue
        given = around(value)
        blocks = [f"{block} {each}" for variable, block in LAYERS.items() for each in given.get(variable, ())]
        first, last = given.get("sigma_start", float("inf")), given.get("sigma_end", 0.0)
        if blocks and given.get("scale", 1.0) > 0 and any(last <= sigma <= first for sigma in sigmas):
            raise refuse_value(value, _skips(blocks, kind), written=written)


def _skips(names: Sequence[str], kind: type) -> str:
    return f"it skips blocks of {kind.__name__} ({', '.join(names)}; {why_not_skipped(kind)})"


def is_of_transformer(name: str) -> bool:
    """Whether an object patch replaces the transformer or a part of it, its `params` among them, which ranks have as
    the file says; model sampling and the like are this process's."""
    return f"{name}.".startswith("diffusion_model.")


def is_attention(layer: object) -> bool:
    """Whether it is ComfyUI's module that says by which function a layer attends: some LoRAs bring one."""
    kind: Any = comfy.ldm.modules.attention.ComfyAttention
    return not is_absent(kind) and isinstance(layer, kind)


def is_compiled(layer: object) -> bool:
    """Whether a module is one that `torch.compile` made of another."""
    return hasattr(layer, "_orig_mod")


def have_controlnet(conds: Mapping[str, Sequence[Mapping] | None]) -> bool:
    """Whether any conditioning has a ControlNet."""
    return any(True for _ in _controls(conds))


def check_controlnets(conds: Mapping[str, Sequence[Mapping] | None]) -> None:
    """Raise `ValueError` when a conditioning has a ControlNet that computes with weights which are not here."""
    for first in _controls(conds):
        control: Any = first
        while control is not None:
            for kind, weights in WITH_OUR_WEIGHTS.items():
                if isinstance(control, kind):
                    what = f"its ControlNet ({type(control).__name__}) computes with the model's {weights}"
                    raise refuse_by(appliers_of_controlnets(), what, "use a ControlNet with layers of its own")
            control = getattr(control, "previous_controlnet", None)


def _controls(conds: Mapping[str, Sequence[Mapping] | None]) -> Iterator[object]:
    entries = (entry for side in conds.values() for entry in side or ())
    return (entry["control"] for entry in entries if entry.get("control") is not None)


def _named(nodes: Sequence[GraphNode]) -> str:
    """`Load LoRA (node 7)`, or some of which it is one."""
    names = ", ".join(map(str, nodes))
    return "some node" if not nodes else f"one of {names}" if len(nodes) > 1 else names
