"""Flux.1's blocks as graphs of torch's compiler.

Letters as in blocks.py, whose functions the halves call, one after the other. Attention, collectives and the gathering
of weights stay outside, so that a graph is the same under every plan. Owns what a half of a block is and which calls
share a graph. Owns no arithmetic, nor how a graph is made (models/graphs.py).

A graph is made for a kind of block, its half, a batch of one or of more, and, in double blocks, for text or none; all
lengths from two on are one graph's. A block runs as it does without a compiler where it has a run of one token, which
torch would make a graph of its own for, and where a LoRA runs beside one of its weights, whose shapes are anybody's.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ...wire.replies import CompiledBlocks
from ..base import Block, Modulation, Tokens, Weights
from ..graphs import Graphs, Half, Marks, Watch
from . import blocks
from .adapter import FluxAdapter, Mlp, StartMlp
from .config import FluxConfig

Values = tuple[torch.Tensor, ...]

# The weights that the two halves of a block take, by kind of block; a layer has a weight and a bias.
BEFORE = {
    "double": tuple(
        f"{stream}_attn.{part}"
        for stream in ("txt", "img")
        for part in ("qkv.weight", "qkv.bias", "norm.query_norm.weight", "norm.key_norm.weight")
    ),
    "single": ("linear1.weight", "linear1.bias", "norm.query_norm.weight", "norm.key_norm.weight"),
}
AFTER = {
    "double": tuple(
        f"{stream}_{layer}.{part}"
        for stream in ("txt", "img")
        for layer in ("attn.proj", "mlp.0", "mlp.2")
        for part in ("weight", "bias")
    ),
    "single": ("linear2.weight", "linear2.bias"),
}


class _Traced:
    """Weights that a graph takes as arguments, so that one graph serves all blocks of a kind."""

    def __init__(self, names: tuple[str, ...], values: Values) -> None:
        self._tensors: Mapping[str, torch.Tensor] = dict(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])


def double_before(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    rope: torch.Tensor,
    weights: Values,
) -> Values:
    """`double_qkv` to trace. `text_rows` (T,) is there for its length, so that a graph serves every length of text.

    `zero_timestep` as in `Tokens`; `rows` of `modulation_rows`; rope (S, D / 2, 2), cosine and sine; `weights` as in
    `BEFORE`.
    """
    num_text = text_rows.shape[0]
    mod = blocks.double_modulation(rows, zero_timestep, num_text)
    return blocks.double_qkv(_Traced(BEFORE["double"], weights), x, num_text, mod, rope)


def double_after(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    weights: Values,
) -> None:
    """`double_rest` to trace, as `double_before`; attn (B, S, C), `weights` as in `AFTER`."""
    num_text = text_rows.shape[0]
    mod = blocks.double_modulation(rows, zero_timestep, num_text)
    blocks.double_rest(_Traced(AFTER["double"], weights), x, num_text, mod, attn)


def single_before(
    x: torch.Tensor, zero_timestep: torch.Tensor | None, rows: Modulation, rope: torch.Tensor, weights: Values
) -> Values:
    """As `double_before`, of a single block; last, what its MLP takes through GELU, (B, S, MLP)."""
    w, hidden = _Traced(BEFORE["single"], weights), x.shape[-1]
    mod = blocks.single_modulation(rows, zero_timestep)
    fused = w.linear("linear1", blocks.modulated(x, mod[0], mod[1]))
    return *blocks.single_qkv(w, fused[..., : 3 * hidden], rope), fused[..., 3 * hidden :]


def single_after(
    x: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    mlp: torch.Tensor,
    weights: Values,
) -> None:
    """As `double_after`, of a single block; mlp (B, S, MLP) is `single_before`'s last."""
    w, hidden = _Traced(AFTER["single"], weights), x.shape[-1]
    joined = blocks.activated(mlp, hidden)
    joined[..., :hidden] = attn
    blocks.single_rest(x, blocks.single_modulation(rows, zero_timestep), w.linear("linear2", joined))


NAMES = {kind: BEFORE[kind] + AFTER[kind] for kind in ("double", "single")}
FUNCTIONS: Mapping[str, Half] = {
    "double_before": double_before,
    "double_after": double_after,
    "single_before": single_before,
    "single_after": single_after,
}


class CompiledFlux(FluxAdapter):
    """A Flux.1 whose blocks run as graphs, for one request. Between `qkv` and `finish` it has one block's weights."""

    def __init__(self, config: FluxConfig, graphs: Graphs, watch: Watch) -> None:
        super().__init__(config)
        self.uncompiled_blocks = 0
        self._graphs, self._watch = graphs, watch
        self._weights: Values | None = None
        self._tokens: Tokens | None = None
        self._key: dict[str, object] = {}
        self._rope = self._text_rows = torch.empty(0)

    def report(self) -> CompiledBlocks:
        """What graphs there are, and what this request's took."""
        return CompiledBlocks(
            graphs=self._graphs.made, uncompiled_blocks=self.uncompiled_blocks, compile_s=self._watch.compile_s
        )

    def modulation(self, block: Block, rows: Modulation, tokens: Tokens) -> Modulation:
        """`rows` as they are: a graph takes them apart."""
        return rows

    def qkv(
        self, block: Block, w: Weights, tokens: Tokens, mod: Modulation, *, shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StartMlp]:
        """As `FluxAdapter.qkv`; of a graph nothing is left for later but to hand a single block's MLP on."""
        self._enter(tokens)
        self._weights = w.plain(NAMES[block.kind]) if block.kind in self._key else None
        if self._weights is None:
            self.uncompiled_blocks += 1
            return super().qkv(block, w, tokens, super().modulation(block, mod, tokens), shared=shared)
        weights = self._weights[: len(BEFORE[block.kind])]
        if block.kind == "double":
            arguments: tuple[object, ...] = (tokens.x, self._text_rows, tokens.zero_timestep, mod, self._rope, weights)
            q, k, v = self._before(block, mod, *arguments)
            return q, k, v, lambda: None
        arguments = (tokens.x, tokens.zero_timestep, mod, self._rope, weights)
        q, k, v, mlp = self._before(block, mod, *arguments)
        return q, k, v, lambda: Mlp(mlp)

    def overlapped_mlp(self, block: Block, w: Weights, mlp: Mlp | None) -> Mlp | None:
        """As `FluxAdapter.overlapped_mlp`; of a graph nothing can be done apart."""
        return super().overlapped_mlp(block, w, mlp) if self._weights is None else mlp

    def finish(
        self,
        block: Block,
        w: Weights,
        tokens: Tokens,
        attn: torch.Tensor,
        mod: Modulation,
        *,
        mlp: Mlp | None,
        residual: torch.Tensor | None,
    ) -> None:
        if self._weights is None:
            mod = super().modulation(block, mod, tokens)
            return super().finish(block, w, tokens, attn, mod, mlp=mlp, residual=residual)
        weights, self._weights = self._weights[len(BEFORE[block.kind]) :], None
        attn = attn.flatten(2).contiguous()  # each strategy has a layout of its own, and a graph just one
        if mlp is None:
            arguments: tuple[object, ...] = (tokens.x, self._text_rows, tokens.zero_timestep, mod, attn, weights)
            self._call(block, "after", mod, (attn,), *arguments)
        else:
            arguments = (tokens.x, tokens.zero_timestep, mod, attn, mlp.joined, weights)
            self._call(block, "after", mod, (attn, mlp.joined), *arguments)
        self.add_residual(tokens, residual)

    def _enter(self, tokens: Tokens) -> None:
        """What all blocks of these tokens share: arguments, and by kind the key of their graph, where they have one."""
        if tokens is self._tokens:
            return
        batch, rows, text = tokens.x.shape[0], tokens.x.shape[1], tokens.num_text
        self._tokens = tokens
        self._rope = torch.view_as_real(tokens.rope)[0, :, 0]  # (S, D / 2, 2)
        self._text_rows = tokens.x.new_empty(text)
        config = self.config
        key: tuple[object, ...] = (
            batch > 1,
            tokens.zero_timestep is None,
            tokens.x.dtype,
            config.hidden_size,
            config.head_dim,
            config.mlp_hidden,
        )
        self._key = {}
        if rows >= 2:
            self._key["single"] = key
        if rows - text >= 2 and text != 1:
            self._key["double"] = (*key, text == 0)

    def _before(self, block: Block, mod: Modulation, *arguments: object) -> Values:
        found = self._call(block, "before", mod, (), *arguments)
        if found is None:
            raise RuntimeError("the first half of a block made nothing")
        return found

    def _call(
        self, block: Block, half: str, mod: Modulation, own: Sequence[torch.Tensor], *arguments: object
    ) -> Values | None:
        """A half of a block through its graph; `own` are the arguments (B, S, ..) that this half alone takes."""

        def marks() -> Marks:
            tokens = self._tokens
            if tokens is None:
                raise RuntimeError("a block without tokens")
            by_row = [(tensor, 1) for tensor in (tokens.x, *own)] + [(self._rope, 0), (self._text_rows, 0)]
            by_row += [] if tokens.zero_timestep is None else [(tokens.zero_timestep, 0)]
            by_image = [(tensor, 0) for tensor in (tokens.x, *own, *mod)]
            return [(tensor, dim) for tensor, dim in by_row + by_image if tensor.shape[dim] > 1]

        return self._graphs.call(
            FUNCTIONS[f"{block.kind}_{half}"], self._key[block.kind], marks, self._watch, *arguments
        )
