"""Stock patches between a model's blocks, rebuilt in a rank from the name of their class, their tensors and numbers.

ComfyUI's own code is what runs: the patch's class, made without its constructor, which would encode a picture, and the
module whose weights it uses. Which classes there are is `REBUILT`; no other name makes anything. A model that runs with
such patches gathers its tokens behind each block where one acts (`spec_behind`), unless each of them takes every token
alone (`takes_rows`): then ranks keep their tokens, and a patch meets these. Owns that list and what a rank holds of it.
Does not own how weights travel (weight_delta.py, kind `hook_weight`), nor what is read from a patch
(nodes/host/model/block_hooks.py).
"""

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..specs import BETWEEN, spec_of
from ..specs.between import whole_behind
from ..specs.spec import ShardingSpec
from .call import TokenCall
from .cuts import cut_first

CallOf = Callable[[], TokenCall | None]
OPTION = "block_hooks"  # of a call's transformer_options: a record for each patch
EXTRAS = "comfy_extras.nodes_model_patch"
# What a patch encodes anew for a latent of another size; the host has done so, and no rank has the picture or the VAE.
PICTURES = ("image", "inpaint_image", "mask")
# Constructor arguments that a module keeps under their names, where its version of ComfyUI has them.
KEPT = ("n_control_layers", "control_in_dim", "additional_in_dim", "broken", "refiner_control")


DOUBLE_BLOCK = "double_block"  # the kind of patches that act behind the blocks of a class's last list
TOKENS = ("img", "img_input", "txt", "pe")  # of what such a patch is given
Numbers = frozenset[int]


def behind_all(config: Mapping[str, Any], blocks: int) -> Numbers:
    """Behind every block."""
    return frozenset(range(blocks))


def at_every_so_many(config: Mapping[str, Any], blocks: int) -> Numbers:
    """As `ZImageControlPatch.__call__`: behind every so many of 30 layers, one for each layer of its own."""
    own = config.get("n_control_layers")
    step = round(30 / own) if own else 0
    return frozenset(range(0, min(blocks, own * step), step)) if own and step else behind_all(config, blocks)


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """A class of patches: the class it is made for, and that of the module it uses.

    `pads`: the patch meets a latent whose sides are multiples of 2. `rows`: the stream whose tokens it changes, each by
    that token and its row of the encoded picture alone, which are for the first tokens; "": it needs all tokens.
    `acts`: what its module is made with (`config_of`) and how many blocks the class's last list has, to the numbers of
    those behind which it looks at tokens.
    """

    transformer: str
    module: str
    pads: bool = False
    rows: str = ""
    acts: Callable[[Mapping[str, Any], int], Numbers] = behind_all


REBUILT = {
    "DiffSynthCnetPatch": Rebuilt(
        transformer="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
        module=f"{EXTRAS}.QwenImageBlockWiseControlNet",
        rows="img",
    ),
    "ZImageControlPatch": Rebuilt(
        transformer="comfy.ldm.lumina.model.NextDiT",
        module="comfy.ldm.lumina.controlnet.ZImage_Control",
        pads=True,
        acts=at_every_so_many,
    ),
}


def takes_rows(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each of these patches can be given a rank's own tokens."""
    return all(record["patch"] in REBUILT and REBUILT[record["patch"]].rows for record in records)


def acting(model: torch.nn.Module, records: Sequence[Mapping[str, Any]]) -> Numbers:
    """Behind which blocks of the last list of `model` these patches act, one of them or several."""
    blocks = _last_blocks(model)
    kinds = ((REBUILT.get(record["patch"]), record["config"]) for record in records)
    return frozenset[int]().union(*(kind.acts(config, blocks) for kind, config in kinds if kind is not None))


def spec_behind(model: torch.nn.Module, numbers: Numbers) -> ShardingSpec:
    """The spec of a call whose patches act behind these blocks of the last list of `model`.

    Raises `ValueError` for a class that has none.
    """
    kind: Any = type(model)
    return _spec_behind(kind, numbers, _last_blocks(model))


@functools.cache
def _spec_behind(kind: type, numbers: Numbers, blocks: int) -> ShardingSpec:
    """Made once: a call of each step asks."""
    return whole_behind(spec_of(kind), spec_of(kind, BETWEEN), numbers, of=blocks)


def _last_blocks(model: torch.nn.Module) -> int:
    """How many blocks the last list has."""
    *_, path = spec_of(model, BETWEEN).attention
    return len(list(model.get_submodule(path).children()))


class ActsBehind:
    """A patch that acts behind these blocks alone: of what the others made it is given no tokens, since they are cut.

    Where its class acts elsewhere all the same, that is an error and no wrong picture.
    """

    def __init__(self, patch: Any, numbers: Numbers) -> None:  # noqa: ANN401
        self._patch, self._numbers = patch, numbers

    def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As the patch; what it hands back has no tokens either."""
        if kwargs["block_index"] not in self._numbers:
            kwargs = kwargs | dict.fromkeys(TOKENS)
        out: dict[str, Any] = self._patch(kwargs)
        return out


class OwnRows:
    """A patch that meets this rank's tokens of `stream`, with its rows of the encoded picture.

    `call_of`: the shared call under way; None: every rank has all tokens.
    """

    def __init__(self, patch: Any, stream: str, call_of: CallOf) -> None:  # noqa: ANN401
        self._patch, self._stream, self._call_of = patch, stream, call_of

    def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As the patch: what a block made, by name, and what becomes of it."""
        patch, call = self._patch, self._call_of()
        whole = patch.encoded_image  # (B, tokens of the picture, C)
        rows = whole if call is None else cut_first(call, whole, self._stream)
        if not rows.shape[1]:  # a rank of references alone; modules may fail on a tensor without tokens
            return kwargs
        patch.encoded_image = rows
        try:
            out: dict[str, Any] = patch(kwargs)
        finally:
            patch.encoded_image = whole
        return out


def config_of(module: Any) -> dict[str, Any]:  # noqa: ANN401
    """What the module's class is made with. Of MLPs' widths it has its own."""
    found = {name: vars(module)[name] for name in KEPT if name in vars(module)}
    if "controlnet_blocks" in dict(module.named_children()):
        first = module.img_in
        more = {"in_dim": first.in_features - module.additional_in_dim, "dim": first.out_features}
        return found | more | {"num_layers": len(module.controlnet_blocks)}
    attention = module.control_layers[0].attention
    heads = {"n_heads": attention.n_local_heads, "n_kv_heads": attention.n_local_kv_heads}
    return found | heads | {"dim": attention.n_local_heads * attention.head_dim}


class HookModules:
    """The weights of modules other than the model on this rank, whole, and the modules once they were asked for.

    A weight's key is the number of its module, a slash and its name.
    """

    def __init__(self) -> None:
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        self._modules: dict[str, torch.nn.Module] = {}

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(weight.nbytes for weights in self._weights.values() for weight in weights.values())

    def take(self, key: str, weight: torch.Tensor) -> None:
        """Hold a weight; one that is held stays, since a module's number stands for its weights, and they are used."""
        number, _, name = key.partition("/")
        self._weights.setdefault(number, {}).setdefault(name, weight)

    def keep(self, keys: Collection[str]) -> None:
        """Let the weights of all modules go that none of these keys names."""
        kept = {key.partition("/")[0] for key in keys}
        for number in self._weights.keys() - kept:
            del self._weights[number]
            self._modules.pop(number, None)

    def patches(
        self,
        records: Sequence[Mapping[str, Any]],
        *,
        call_of: CallOf | None = None,
        behind: Numbers | None = None,
    ) -> dict[str, list[Any]]:
        """By kind, fresh patches for one call: what they keep from block to block is this call's alone.

        `call_of`: which call is shared, where they meet this rank's tokens (`takes_rows`); None: they meet all tokens.
        `behind`: the blocks of the last list behind which tokens are whole (`acting`); None: behind all.

        Raises `ValueError` for a class that is not rebuilt, and for a module whose weights are not here.
        """
        found: dict[str, list[Any]] = {}
        for record in records:
            patch = self._patch(record)
            if call_of is not None:
                patch = OwnRows(patch, REBUILT[record["patch"]].rows, call_of)
            for kind in record["kinds"]:
                if behind is not None and kind == DOUBLE_BLOCK:
                    found.setdefault(kind, []).append(ActsBehind(patch, behind))
                else:
                    found.setdefault(kind, []).append(patch)
        return found

    def _patch(self, record: Mapping[str, Any]) -> Any:  # noqa: ANN401
        name, number = record["patch"], str(record["module"])
        if name not in REBUILT:
            raise ValueError(f"{name!r} is no patch that ranks rebuild; they do {', '.join(REBUILT)}")
        if number not in self._modules:
            self._modules[number] = self._module(REBUILT[name].module, number, record["config"])
        kind = getattr(importlib.import_module(EXTRAS), name)
        patch = kind.__new__(kind)
        vae = SimpleNamespace(spacial_compression_encode=lambda: record["compression"])
        used = SimpleNamespace(model=self._modules[number])
        vars(patch).update(dict.fromkeys((*PICTURES, "temp_data")), model_patch=used, vae=vae, **record["state"])
        return patch

    def _module(self, path: str, number: str, config: Mapping[str, Any]) -> torch.nn.Module:
        import comfy.ops

        weights = self._weights.get(number)
        if weights is None:
            raise ValueError(f"a patch of the blocks uses weights of module {number}, which this rank has not")
        place, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(place), name)
        dtype = next(iter(weights.values())).dtype
        with torch.device("meta"):
            module: torch.nn.Module = kind(**config, dtype=dtype, device="meta", operations=comfy.ops.manual_cast)
        module.load_state_dict(weights, assign=True)
        return module.requires_grad_(False)
