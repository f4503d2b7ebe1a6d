"""One pass of a call through a stage of a pipeline: a patch of its tokens, or all of them while it is warm-up.

A patch is the same cut as a rank's: with M patches and P ranks in a stage, every stream is dealt to M x P parts, and
patch m has those from m x P on, one on each rank. Keys of all parts are kept in the order of the parts; a pass writes
those of its own. A pass of all tokens, which is cut for P ranks as without a pipeline, writes all of them.

What runs before the staged blocks and shares tokens as well (a refiner) does so over the P ranks, all tokens in each
step: in the pass of the first patch, whose result the others are given.

Owns where a pass's tokens stand among all. Does not own which ranks exchange what (parallel/attention.py), which
blocks run (stage.py), nor which pass comes when (worker/hosted_pipeline.py).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.attention import QKV, AttentionFunction, SequenceParallelAttention
from ...parallel.kept_keys import HeldRows, KeptKeys
from ..specs.words import Attention, StreamTokens
from .call import TokenCall
from .places import rows_of

GATHERED, BEFORE = "gathered.", "before."


class PassEndsError(Exception):
    """Raised through a module's forward: this rank has nothing more to do in this pass. Caught where the pass began."""


class PassCall(TokenCall):
    """A pass of patch number `patch`, of `patches`; None: of all tokens. `held` are the keys of one conditioning.

    `before`: the streams of what runs before the staged blocks. `ends`: the pass ends where all of its rows of the
    result are gathered.
    """

    def __init__(
        self,
        group: SequenceParallelAttention,
        name: str,
        *,
        patches: int,
        patch: int | None,
        held: HeldRows,
        before: frozenset[str],
        ends: bool,
    ) -> None:
        super().__init__(group, name)
        self._patches, self._patch, self._held = patches, patch, held
        self._before, self._ends = before, ends
        self._staged = False  # whether the first stream of staged blocks was met
        self._parts = TokenCall(group, name)  # how tokens are dealt to all parts of all patches
        self._parts.parts, self._parts.index = patches * group.parts, (patch or 0) * group.parts + group.index
        self._counts: dict[int, int] = {}
        self._kept_places: dict[int, Tensor] = {}
        self._keys: tuple[weakref.ref[Tensor], str] | None = None  # of the last attention, and its site
        self._gathers = 0

    def introduce(self, stream: str, total: int) -> tuple[int, ...]:
        """As `TokenCall.introduce`, and for the parts of all patches."""
        self._enter(stream)
        self._parts.grid = self.grid
        self._parts.introduce(stream, total)
        return super().introduce(stream, total)

    def introduce_whole(self, stream: str, total: int) -> int:
        """As `TokenCall.introduce_whole`."""
        self._enter(stream)
        self._parts.introduce_whole(stream, total)
        return super().introduce_whole(stream, total)

    def introduce_first(self, stream: str, total: int) -> tuple[int, ...]:
        """As `TokenCall.introduce_first`."""
        self._parts.introduce_first(stream, total)
        return super().introduce_first(stream, total)

    def _enter(self, stream: str) -> None:
        """From the first stream of the staged blocks on, tokens are cut for this pass."""
        if stream not in self._before and not self._staged:
            self._staged = True
            if self._patch is not None:
                self.parts, self.index = self._parts.parts, self._parts.index

    def of_chunk(self, lengths: Sequence[int]) -> Sequence[int]:
        """Of a number for each part those of this pass, one a rank."""
        if self._patch is None or not self._staged:
            return lengths
        return lengths[self._patch * self.group.parts :][: self.group.parts]

    def attend(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        attention: Attention,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: Tensor | None,
        **how: Any,  # noqa: ANN401
    ) -> Tensor:
        """This pass's queries over the keys of all tokens, of which those of later patches are of the call before."""
        if self._staged:
            self._refuse_small()
            if mask is not None and self._patch is not None and mask.shape[2] == sum(query_lengths) > 1:
                before = sum(query_lengths[: self._patch * self.group.parts])
                mask = mask.narrow(2, before, sum(self.of_chunk(query_lengths)))
            how["kept"] = self._kept(attention, qkv[1], key_lengths, mask)
        queries, keys = self.of_chunk(query_lengths), self.of_chunk(key_lengths)
        return super().attend(kernel, qkv, attention, query_lengths=queries, key_lengths=keys, mask=mask, **how)

    def _kept(self, attention: Attention, keys: Tensor, lengths: Sequence[int], mask: Tensor | None) -> KeptKeys:
        """Where these keys are kept; and their mask, where later passes need it."""
        site, places = self._site(attention, keys), self._places(attention, lengths, keys.device)
        if mask is not None and self._patch is None and mask.shape[2] == 1:  # may be made from this rank's tokens
            self._held.put(f"{site}.mask", mask, places, dim=3, total=mask.shape[3])
        return KeptKeys(rows=self._held, site=site, places=places, total=sum(lengths), fresh=self._patch is None)

    def gather(self, stream: str, tensor: Tensor, *, dim: int) -> Tensor:
        """All rows of a stream: those of other patches as they came last."""
        lengths = self.streams[stream]
        if not self._staged:
            return self._gather_before(f"{BEFORE}{stream}", tensor, dim, lengths)
        rows = self.group.gather(tensor, dim=dim, lengths=self.of_chunk(lengths)).contiguous()
        if stream in self._parts.uncut:  # each patch has all of it
            return rows
        number, self._gathers = self._gathers, self._gathers + 1
        before = 0 if self._patch is None else sum(lengths[: self._patch * self.group.parts])
        places = slice(before, before + rows.shape[dim])
        held = self._held.put(f"{GATHERED}{number}", rows, places, dim=dim, total=sum(lengths))
        if self._patch is None:
            return rows
        if self._ends and self._gathers == self._held.count(GATHERED):
            raise PassEndsError
        return held.clone()

    def gather_keys(self, attention: Attention, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """What has a row for each key, in the order of the keys that `attend` has."""
        rows = self.group.gather(tensor, dim=dim, lengths=self.of_chunk(lengths))
        if self._patch is None or not self._staged:
            return rows
        places = self._places(attention, lengths, tensor.device)
        return self._held.put(f"{self._site(attention)}.mask", rows, places, dim=dim, total=sum(lengths)).clone()

    def _gather_before(self, name: str, tensor: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """All rows of what runs before the staged blocks: of this pass, or of the first patch's."""
        if self._patch:
            return self._held.get(name).clone()
        rows = self.group.gather(tensor, dim=dim, lengths=lengths)
        self._held.put(name, rows, slice(None), dim=dim, total=rows.shape[dim])
        return rows

    def _site(self, attention: Attention, keys: Tensor | None = None) -> str:
        """Which attention of the module's this is; the one before where it is over the same keys."""
        if keys is not None and self._keys is not None and self._keys[0]() is keys:
            return self._keys[1]
        number = self._counts.get(id(attention), 0)
        site = f"{id(attention)}.{number}"
        if keys is not None:  # a mask comes before the keys that it is for
            self._counts[id(attention)] = number + 1
            self._keys = weakref.ref(keys), site
        return site

    def _places(self, attention: Attention, key_lengths: Sequence[int], device: torch.device) -> Tensor | slice:
        """Where the keys of this pass, part after part, stand among those that are kept.

        On `device`: to copy an index from the host makes the host wait for a GPU, in every attention.
        """
        if self._patch is not None:
            before = sum(key_lengths[: self._patch * self.group.parts])
            return slice(before, before + sum(self.of_chunk(key_lengths)))
        known = self._kept_places.get(id(attention))
        if known is None:
            runs = [StreamTokens(stream) for stream in attention.keys]
            came, kept = (
                torch.cat([rows_of(call, runs, part, with_uncut=part == 0) for part in range(call.parts)])
                for call in (self, self._parts)
            )
            places = torch.empty_like(kept)
            places[kept] = torch.arange(len(kept))
            known = self._kept_places[id(attention)] = places[came].to(device)
        return known

    def _refuse_small(self) -> None:
        """Raise `ValueError` where no stream has a token for each part: every patch would be all of them."""
        staged = self._parts.streams.keys() - self._before
        if self._parts.uncut.issuperset(staged):
            tokens = {stream: self._parts.total(stream) for stream in sorted(staged)}
            told = ", ".join(f"{total} of {stream}" for stream, total in tokens.items())
            ranks = f" on {self.group.parts} ranks each" if self.group.parts > 1 else ""
            raise ValueError(
                f"patches={self._patches}{ranks} is more than the tokens of this call, {told}; use fewer patches, or a "
                "bigger image"
            )
