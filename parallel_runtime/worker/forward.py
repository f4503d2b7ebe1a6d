"""A step on one rank, piece by piece: some rows of one call of the model, from shared memory to shared memory.

Owns what this rank takes of a call's inputs (its batch group's rows of the batch, its part of the tokens) and the loop
over blocks. Knows no handle, no socket, and no arithmetic of a model.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..models.base import Adapter, Block, Modulation, Tokens
from ..parallel.kernels import additive_mask
from ..parallel.sequence import LocalAttention, PendingOutput, SequenceAttention
from ..parallel.shard import SequenceShard
from ..plan import BatchSlice
from ..timing import RegionTimer
from ..weights.model_weights import ReplicatedWeights
from .inputs import RequestInputs, call_tensors, to_host
from .mesh import Mesh

# Sends what other ranks need first; what it returns attends, and gives this rank's part once it has arrived.
StartAttention = Callable[[Block, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], PendingOutput]]


class Rows(Protocol):
    """Who says which rows of a whole tensor are this rank's."""

    def take(self, tensor: torch.Tensor, *, stream: str, dim: int) -> torch.Tensor:
        """They, along `dim`, by the tokens of `stream`."""
        ...


@dataclass(frozen=True)
class Forward:
    """The model on one rank, for as long as one request takes. Tokens are shared by the ranks of `sequence`."""

    adapter: Adapter
    weights: ReplicatedWeights
    sequence: SequenceAttention
    device: torch.device
    timer: RegionTimer
    beat: Callable[[], None]
    sent: RequestInputs

    def run_batch_groups(
        self,
        batch_groups: Sequence[Sequence[BatchSlice]],
        mesh: Mesh,
        tensors: Mapping[str, torch.Tensor],
        calls: Sequence[Mapping],
    ) -> None:
        """Run this rank's pieces of a request.

        `tensors` and `calls`, which are options, are the request's.
        """
        for piece in batch_groups[mesh.batch_group]:
            options = calls[piece.call]
            whole = call_tensors(tensors, 0 if options.get("first_row") else piece.call)
            self.run(piece, whole | {"out": tensors[f"{piece.call}.out"]}, options)

    def run(self, piece: BatchSlice, whole: Mapping[str, torch.Tensor], options: Mapping) -> None:
        """Run a piece: `whole` holds all inputs of its call, and "out", of which this rank's part is written.

        With option `first_row`, a negative control, it computes the first row of `whole` in place of its own.
        """
        source = BatchSlice(piece.call, 0, 1) if options.get("first_row") else piece
        shard = self.shard(whole)
        with self.timer.region("hand_over"):
            inputs = self.inputs(source, shard, whole)
        with self.timer.region("embed"), self.weights.block("") as w:
            tokens = self.adapter.embed(w, inputs["img"], self.adapter.condition(w, inputs))
        velocity = self.velocity(tokens, shard, inputs, options)
        with self.timer.region("gather"):
            to_host(self._mine(piece, shard, "out", whole["out"]), velocity)

    def shard(self, whole: Mapping[str, torch.Tensor]) -> SequenceShard:
        """This rank's part of a call's tokens."""
        sequence = self.sequence
        return SequenceShard(whole["txt"].shape[1], whole["img"].shape[1], sequence.parts, sequence.index)

    def inputs(self, piece: BatchSlice, rows: Rows, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of a call's inputs, on its device. Not to be written to: they may be what was sent."""
        return {
            name: self.sent.on_device(tensor, self._mine(piece, rows, name, tensor))
            for name, tensor in whole.items()
            if name != "out"
        }

    def _mine(self, piece: BatchSlice, rows: Rows, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's view of one input or output: rows of the batch, then tokens.

        Residual `control_in.3` is split as `control_in`. A tensor of one row serves every row.
        """
        kind = name.partition(".")[0]
        if kind in self.adapter.batched and tensor.shape[0] > 1:
            tensor = tensor[piece.start : piece.stop]
        split = self.adapter.split_plan.get(kind)
        return tensor if split is None else rows.take(tensor, stream=split.stream, dim=split.dim)

    def _strategy(self, options: Mapping) -> SequenceAttention | LocalAttention:
        """How tokens attend. For tests: `local_attention`, a negative control; `ungathered`, however few they are."""
        if options.get("local_attention"):
            return LocalAttention()
        return self.sequence.ungathered() if options.get("ungathered") else self.sequence

    def velocity(
        self,
        tokens: Tokens,
        shard: SequenceShard,
        inputs: Mapping[str, torch.Tensor],
        options: Mapping,
        *,
        modulations: MutableMapping[str, Modulation] | None = None,
    ) -> torch.Tensor:
        """From embedded tokens through all blocks to this rank's rows of the velocity, (B, image rows, C).

        `modulations` are each block's `modulation_rows`, by its prefix, where they were computed before.
        """
        strategy = self._strategy(options)
        mask = _mask_in_part_order(inputs.get("mask"), shard, tokens.x.dtype)

        def start_attention(_: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], PendingOutput]:
            return partial(strategy.start(q, k, v, lengths=shard.lengths), mask)

        self.run_blocks(
            self.adapter.blocks,
            tokens,
            inputs,
            options,
            start_attention=start_attention,
            modulations={} if modulations is None else modulations,
        )
        return self.head(tokens)

    def run_blocks(
        self,
        blocks: Sequence[Block],
        tokens: Tokens,
        inputs: Mapping[str, torch.Tensor],
        options: Mapping,
        *,
        start_attention: StartAttention,
        modulations: MutableMapping[str, Modulation],
    ) -> None:
        """Tokens through some blocks, in place. `start_attention` is given the block and this rank's q, k and v.

        `modulations` as for `velocity`; those that are not there are computed, and kept for another pass.
        """
        adapter, weights = self.adapter, self.weights
        residuals = {"double": options.get("control_in", ()), "single": options.get("control_out", ())}
        for block in blocks:
            with self.timer.region(f"{block.kind}_blocks"), weights.block(block.prefix) as w:
                with self.timer.region("modulation"):
                    if block.prefix not in modulations:
                        modulations[block.prefix] = adapter.modulation_rows(block, w, tokens.vec)
                    mod = adapter.modulation(block, modulations[block.prefix], tokens)
                q, k, v, start_mlp = adapter.qkv(block, w, tokens, mod, shared=self.sequence.parts > 1)
                with self.timer.region("attention"):
                    complete = start_attention(block, q, k, v)
                mlp = start_mlp()  # while keys and values travel
                with self.timer.region("attention"):
                    output = complete()
                if output.under_way:
                    mlp = adapter.overlapped_mlp(block, w, mlp)
                with self.timer.region("attention"):
                    attn = output.wait()
                residual = _residual(block.kind, block.index, residuals[block.kind], inputs)
                adapter.finish(block, w, tokens, attn, mod, mlp=mlp, residual=residual)
            self.beat()

    def head(self, tokens: Tokens) -> torch.Tensor:
        """From the last block to this rank's rows of the velocity, (B, image rows, C)."""
        with self.timer.region("head"), self.weights.block("") as w:
            return self.adapter.head(w, tokens)


def _mask_in_part_order(mask: torch.Tensor | None, shard: SequenceShard, dtype: torch.dtype) -> torch.Tensor | None:
    """The attention mask as the strategies take it: added to the scores, tokens in the order of the parts."""
    if mask is None:
        return None
    order = torch.tensor(shard.order, device=mask.device)
    return additive_mask(mask, dtype).index_select(1, order).index_select(2, order)


def _residual(
    kind: str, index: int, numbers: list[int | None], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The ControlNet residual of one block, or None. `numbers` names each block's, since several may share one."""
    number = numbers[index] if index < len(numbers) else None
    if number is None:
        return None
    return inputs[f"{'control_in' if kind == 'double' else 'control_out'}.{number}"]
