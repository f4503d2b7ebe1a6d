"""What the words of a spec do to values: from whole to this rank's tokens, and back.

Which function is a word's is decided once, when a model is shared (word_handlers.py). Does not own which rank has which
tokens (call.py), where values come from (hooks.py), nor rows and columns of pictures and places of tokens (places.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..specs.words import Frames, StreamTokens, Tokens
from .call import TokenCall
from .lightricks import cut_guides, cut_timestep

Change = Callable[[TokenCall, Any], Any]
Moved = Callable[[Tensor, Tensor], Tensor]  # a tensor, and a view of it, to that view on the device


def of_tensors(change: Callable[[TokenCall, Tensor], Tensor]) -> Change:
    """The change of a tensor, for each tensor in a value: tuples and lists as well, anything else as it is."""

    def apply(call: TokenCall, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            return change(call, value)
        if isinstance(value, (tuple, list)):
            return type(value)([apply(call, each) for each in value])
        return value

    return apply


def cut_tokens(call: TokenCall, value: Tensor, word: Tokens) -> Tensor:
    """This rank's rows of the streams in the word's dim, as a tensor of its own: blocks write in place."""
    dim = 2 if word.heads and value.ndim == 4 else word.dim
    total = value.shape[dim]
    if total == 1 and all(run.stream in call.streams for run in word.runs):
        return value  # one row for all tokens
    if word.opens:
        *others, new = word.runs
        rest = total - sum(call.total(run.stream) for run in others)
        if rest == 0:
            return value
        if new.stream not in call.streams:
            call.introduce(new.stream, rest)
    pieces, at = [], 0
    for run in word.runs:
        mine = (call.streams.get(run.stream) or call.introduce(run.stream, total))[call.index]
        pieces.append(value.narrow(dim, at if run.held else at + call.start(run.stream), mine))
        at += mine if run.held else call.total(run.stream)
    if word.rest:
        pieces.append(value.narrow(dim, at, total - at))
    elif at != total:
        raise ValueError(other_length(call, word.runs, at, total))
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def cut_frames(call: TokenCall, value: Any, word: Frames) -> Any:  # noqa: ANN401
    """(B, frames or tokens or 1, ...) to this rank's rows, one for each token. Frames that lack tokens are the last."""
    start = call.start(word.stream)
    end = start + call.streams[word.stream][call.index]
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return cut_timestep(value, start, end)
    if word.ndim is not None and value.ndim != word.ndim:
        return value
    frames, tokens = value.shape[1], call.total(word.stream)
    if frames == 1:
        return value
    if frames == tokens:
        return value[:, start:end].contiguous()
    each = -(-tokens // frames)
    return value.index_select(1, torch.arange(start, end, device=value.device) // each)


def cut_index(call: TokenCall, value: int, stream: str) -> int:
    """How many of the first `value` tokens of a stream are this rank's."""
    return call.introduce_first(stream, value)[call.index]


def cut_last(call: TokenCall, value: Tensor, stream: str) -> Tensor:
    """(B, rows, ...) for the last tokens of a stream to those for the last of this rank's, which may be none."""
    before = call.total(stream) - value.shape[1]  # tokens that have no row
    start = call.start(stream) - before
    return value[:, max(start, 0) : max(start + call.streams[stream][call.index], 0)]


def cut_first(call: TokenCall, value: Tensor, stream: str) -> Tensor:
    """(B, rows, ...) for the first tokens of a stream to those for this rank's, which may be none."""
    start = call.start(stream)
    return value[:, start : start + call.streams[stream][call.index]]


def cut_guide_mask(call: TokenCall, mask: Any, stream: str) -> Any:  # noqa: ANN401
    """LTX's `GuideAttentionMask` over the tokens of a stream, for these ranks; as it is where every rank has all."""
    if mask is None or stream in call.uncut:
        return mask
    return cut_guides(mask, call.streams[stream], call.index)


def cut_control(
    call: TokenCall,
    residuals: Sequence[Tensor | None],
    stream: str,
    found: dict[tuple[str, int], Tensor],
    moved: Moved | None,
) -> list[Tensor | None]:
    """This rank's rows of a ControlNet's residuals (B, S, C); a shorter one is for the first tokens of the stream.

    `moved`: a residual and its rows to these rows on the device, once where it stands in several places; `found` has
    those of the call's other lists.
    """
    for each in residuals:
        if each is not None and (stream, id(each)) not in found:
            rows = cut_first(call, each, stream)
            found[stream, id(each)] = rows if moved is None else moved(each, rows)
    return [None if each is None else found[stream, id(each)] for each in residuals]


def gather_tokens(call: TokenCall, value: Tensor, word: Tokens) -> Tensor:
    """All rows of the streams in `word.dim`; of those that are held, this rank's."""
    pieces, at = [], 0
    for run in word.runs:
        lengths = call.streams[run.stream]
        piece = value.narrow(word.dim, at, lengths[call.index])
        is_whole = run.held or run.stream in call.uncut or not sum(lengths)
        pieces.append(piece if is_whole else call.gather(run.stream, piece, dim=word.dim))
        at += lengths[call.index]
    if at != value.shape[word.dim]:
        raise ValueError(other_length(call, word.runs, at, value.shape[word.dim]))
    return torch.cat(pieces, word.dim) if len(pieces) > 1 else pieces[0]


def other_length(call: TokenCall, runs: Sequence[StreamTokens], planned: int, found: int) -> str:
    names = "+".join(run.stream for run in runs)
    return (
        f"{call.name}: {names} has {planned} tokens by the plan and {found} in this call; "
        "use a ComfyUI that the plan was made for"
    )
