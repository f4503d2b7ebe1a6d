"""Files of each format beside ComfyUI's own loader on pretended cards: which kernels run, and what they move.

Each file is loaded twice for each card, as ComfyUI's loader does and as a rank does; both are called and counted. A
card is a compute capability that ComfyUI is told of; everything runs on a CPU, which has products of fp8 and int8.
Those of nvfp4 and mxfp8 are stand-ins of one operation each, which widens what it multiplies. That ranks that share a
call agree is test_quantised.py's.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from host.formats import BLOCK
from host.outcomes import StockFailsError
from host.quantised import quantised
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.models.hosted.build import recognise
from parallel_runtime.models.hosted.dtypes import loaded_dtypes
from parallel_runtime.models.hosted.formats import widened_formats
from parallel_runtime.models.parts import plain_parts
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.worker.hosted_weights import HostedWeights

from .quantised_model import COMFYUI, INPUTS, SIZES, TOLD
from .ranks import Ranks
from .tiny import at, build, noise

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
CARDS = {"8.6": (8, 6), "9.0": (9, 0), "12.0": (12, 0)}  # 8.9 has the products that 9.0 has
PLAIN = {"bf16": torch.bfloat16, "fp8 plain": torch.float8_e4m3fn, "fp8 plain, e5m2": torch.float8_e5m2}
FILES = (*PLAIN, "fp8 e4m3", "fp8 e4m3, products in full", "int8, rotated", "nvfp4", "mxfp8", "mixed")
FAST = {"": FILES, "fp8_matrix_mult": ("bf16", "fp8 plain", "fp8 plain, e5m2", "fp8 e4m3")}  # of --fast


class OnACard(HostedWeights):
    """Weights of a rank that has a device, which lie on the CPU all the same."""

    own_copy = True


@dataclass(frozen=True)
class Use:
    """What a call did: kernels by name and the dtype that they had the matrix in; bytes moved and held."""

    kernels: Mapping[str, int]
    moved_bytes: int
    held_bytes: int


class WeightTraffic(TorchDispatchMode):
    """Counts what uses matrices, and the bytes of them that move, while it is entered; `use` says what it found.

    A copy of a matrix in another dtype is read once and written once, and read again by its product: what a device does
    with memory, whatever its caches hold. Activations are not counted, nor biases and norms.
    """

    def __init__(self, matrices: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._parts = [part for matrix in matrices for part in plain_parts(matrix)[0] if part.numel() > 1]
        self._known = {_address(part) for part in self._parts}
        self._alive: list[torch.Tensor] = []  # what was made of them: its address stays its own
        self._kernels: Counter[str] = Counter()
        self._moved = 0

    @property
    def use(self) -> Use:
        return Use(self._kernels, self._moved, sum(part.nbytes for part in self._parts))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a quantised tensor says what it does by kernels of plain ones, which come here
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        matrices = [each for each in given if _address(each) in self._known]
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        changed = func._schema.is_mutable
        if not matrices or (not changed and all(_address(each) in self._known for each in made)):  # views
            return out
        others = [each for each in given if _address(each) not in self._known and each.numel() > 1]
        self._moved += sum(each.nbytes for each in matrices)
        self._kernels[f"{func} {' '.join(sorted({str(each.dtype)[6:] for each in matrices}))}"] += 1
        if not others or changed:
            self._moved += sum(each.nbytes for each in made)
            self._alive += made
            self._known |= {_address(each) for each in made}
        return out


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Loaded:
    """A transformer, how its kernels used its matrices, and what it returned."""

    use: Use
    out: Tensor
    layer: str
    dtype: torch.dtype


@contextmanager
def card(capability: tuple[int, int], fast: str) -> Iterator[None]:
    """ComfyUI finds a card of that capability, which computes in bf16, and was started with that --fast."""
    import comfy.model_management as management
    from comfy.cli_args import PerformanceFeature, args

    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, name="pretended", total_memory=24 << 30)
    with (
        mock.patch.object(management, "is_nvidia", lambda: True),
        mock.patch.object(management, "should_use_bf16", lambda *_, **__: True),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: found),
        mock.patch.object(args, "fast", {PerformanceFeature(fast)} if fast else set()),
    ):
        yield


@contextmanager
def products() -> Iterator[None]:
    """Inside, the products of nvfp4 and mxfp8 that a CPU lacks, one operation each."""
    import comfy_kitchen

    library = torch.library.Library("stand_in", "FRAGMENT")
    library.define("nvfp4(Tensor a, Tensor b, Tensor sa, Tensor sb, Tensor ba, Tensor bb, ScalarType out) -> Tensor")
    library.define("mxfp8(Tensor a, Tensor b, Tensor ba, Tensor bb, ScalarType out) -> Tensor")

    def nvfp4(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ba: Tensor, bb: Tensor, out: torch.dtype) -> Tensor:
        left, right = (comfy_kitchen.dequantize_nvfp4(*each, out) for each in ((a, sa, ba), (b, sb, bb)))
        return left @ right.T

    def mxfp8(a: Tensor, b: Tensor, ba: Tensor, bb: Tensor, out: torch.dtype) -> Tensor:
        left, right = (comfy_kitchen.dequantize_mxfp8(*each, out) for each in ((a, ba), (b, bb)))
        return left @ right.T

    library.impl("nvfp4", nvfp4, "CPU")
    library.impl("mxfp8", mxfp8, "CPU")

    def of_nvfp4(
        a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype, **scales: Tensor
    ) -> Tensor:
        names = ("tensor_scale_a", "tensor_scale_b", "block_scale_a", "block_scale_b")
        out: Tensor = torch.ops.stand_in.nvfp4(a, b, *(scales[name] for name in names), out_dtype)
        return out if bias is None else out + bias

    def of_mxfp8(
        a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype, **scales: Tensor
    ) -> Tensor:
        out: Tensor = torch.ops.stand_in.mxfp8(a, b, scales["block_scale_a"], scales["block_scale_b"], out_dtype)
        return out if bias is None else out + bias

    with mock.patch.multiple(comfy_kitchen, scaled_mm_nvfp4=of_nvfp4, scaled_mm_mxfp8=of_mxfp8):
        yield


def write_files(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """A file of each kind, and why there is none of the others."""
    model = build("comfy.ldm.wan.model.WanModel", model_type="t2v", text_len=9, **SIZES)
    whole, paths, absent = dict(model.state_dict()), {}, {}
    for kind in FILES:
        said: dict[str, str] = {}
        if kind in PLAIN:
            narrow = PLAIN[kind]
            tensors = {
                name: each.to(narrow if BLOCK.search(name) and each.ndim == 2 else torch.bfloat16)
                for name, each in whole.items()
            }
        else:
            try:
                tensors, said = quantised(whole, kind)
            except StockFailsError as error:
                absent[kind] = str(error)
                continue
        paths[kind] = folder / f"{len(paths)}.safetensors"
        save_file(tensors, paths[kind], metadata={"config": json.dumps({"transformer": TOLD})} | said)
    return paths, absent


def called(module: torch.nn.Module, dtype: torch.dtype) -> Loaded:
    """One call of a transformer that computes in that dtype."""
    linear = [each for each in module.modules() if hasattr(each, "in_features") and hasattr(each, "out_features")]
    inputs = {name: noise(*shape).to(dtype) for name, shape in INPUTS.items()} | {"timestep": at(700, 650)}
    with torch.inference_mode(), WeightTraffic(each.weight for each in linear) as counted:
        out = module(**inputs)
    layer: Any = module.get_submodule("blocks.0.ffn.0")
    return Loaded(counted.use, out, type(layer).__qualname__, dtype)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata, as ComfyUI reads them."""
    import comfy.utils

    tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    return tensors, metadata or {}


def of_stock(path: Path) -> Loaded:
    """What ComfyUI's loader makes of a file, called."""
    import comfy.sd

    tensors, metadata = read(path)
    whole = comfy.sd.load_diffusion_model_state_dict(tensors, metadata=metadata).model
    return called(whole.diffusion_model, whole.get_dtype_inference())


def of_rank(path: Path) -> Loaded:
    """What a rank makes of it, called; its spec is what the loader of this pack says of the file."""
    recognised = recognise(str(path), *read(path))
    dtype, kept = loaded_dtypes("default", recognised.weights, recognised.config, CPU)
    name = str(dtype).removeprefix("torch.")
    weights = OnACard(
        ModelSpec.of(str(path), name, comfyui=COMFYUI, kept=kept), device=CPU, group=Axis("one"), offloaded=False
    )
    weights.load(progress=lambda *_: None, cancelled=lambda: False)
    return called(weights.module, dtype)


def said_of(path: Path) -> list[str]:
    """The formats of a file that are said to be widened on this card."""
    recognised = recognise(str(path), *read(path))
    return list(widened_formats(recognised.config, recognised.weights))


def row(stock: Loaded, rank: Loaded, file_bytes: int) -> dict[str, Any]:
    """The two side by side, stock's first."""
    return {
        "kernels": [dict(stock.use.kernels), dict(rank.use.kernels)],
        "moved": [stock.use.moved_bytes, rank.use.moved_bytes],
        "held": [stock.use.held_bytes, rank.use.held_bytes],
        "layers": [stock.layer, rank.layer],
        "dtypes": [str(stock.dtype), str(rank.dtype)],
        "equal": torch.equal(stock.out, rank.out),
        "file": file_bytes,
    }


def rows_of(_: object, folder: str) -> dict[str, Any]:
    """Every file on every card, run in one rank."""
    with products():
        paths, absent = write_files(Path(folder))
        rows: dict[str, Any] = {"absent": absent}
        for fast, kinds in FAST.items():
            for name, capability in CARDS.items():
                with card(capability, fast):
                    for kind in paths.keys() & set(kinds):
                        path = paths[kind]
                        found = row(of_stock(path), of_rank(path), path.stat().st_size)
                        rows[f"{kind} | {name} | {fast}"] = found | {"widened": said_of(path)}
    return rows


# Kernels that multiply in the file's own format, by their names, and the cards that have them. Others widen first.
FP8, INT8, STAND_IN = "aten._scaled_mm", "comfy_kitchen.int8_linear", "stand_in."
PRODUCTS = {
    ("fp8 e4m3", ""): (FP8, ("9.0", "12.0")),
    ("fp8 e4m3", "fp8_matrix_mult"): (FP8, ("9.0", "12.0")),
    ("fp8 plain", "fp8_matrix_mult"): (FP8, ("9.0", "12.0")),
    ("int8, rotated", ""): (INT8, tuple(CARDS)),
    ("nvfp4", ""): (STAND_IN, ("12.0",)),
    ("mxfp8", ""): (STAND_IN, ("12.0",)),
}
MORE_THAN_THE_FILE = 1.2


@pytest.fixture(scope="module")
def rows(comfyui_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What formats_as_stock.py counted, by file, card and --fast."""
    (found,) = comfyui_ranks.run(rows_of, tmp_path_factory.mktemp("stock"), ranks=1)
    return found


def alike(row: dict[str, Any]) -> bool:
    """Whether a rank does what stock does, to the last bit."""
    pairs = [row[name] for name in ("kernels", "moved", "held", "layers", "dtypes")]
    return row["equal"] and all(stock == rank for stock, rank in pairs)


@pytest.mark.parametrize("card", CARDS)
def test_a_rank_uses_the_kernels_of_stock_and_moves_its_bytes(rows: dict[str, Any], card: str) -> None:
    for fast, kinds in FAST.items():
        for kind in set(kinds) - rows["absent"].keys():
            row = rows[f"{kind} | {card} | {fast}"]
            assert alike(row), (kind, fast, row)
            kernel, cards = PRODUCTS.get((kind, fast), ("", ()))
            multiplied = any(name.startswith(kernel) for name in row["kernels"][1]) if kernel else False
            assert multiplied == (card in cards), (kind, fast, row["kernels"])
            if (kind, fast) in PRODUCTS and "plain" not in kind:
                assert bool(row["widened"]) != multiplied, "what the report says of the card is wrong"
            if multiplied:
                assert row["moved"][1] <= MORE_THAN_THE_FILE * row["file"], (kind, fast, row)


def test_a_rank_that_chose_as_for_another_card_would_be_seen(rows: dict[str, Any]) -> None:
    """The control: a rank on a card without products beside stock on one that has them."""
    for kind, fast in PRODUCTS:
        if kind in rows["absent"]:  # from this ComfyUI
            continue
        old, new = (rows[f"{kind} | {card} | {fast}"] for card in ("8.6", "12.0"))
        swapped = new | {name: [new[name][0], old[name][1]] for name in ("kernels", "moved", "held", "layers")}
        assert alike(swapped) == (kind == "int8, rotated"), kind
