"""One call of a model, looked at: its lists of blocks, and the plans that explain several calls.

Owns the order of the questions. Does not own any of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .between import Between
from .blocks import NotFoundError, each_call_of, find_lists
from .compose import Candidate, candidates
from .lists import ListWords, find_list, merge_calls
from .record import Call, CallWatch, Tap


@dataclass
class LookedAt:
    """What one call showed. `between` is None where blocks run several times in it."""

    lists: dict[str, ListWords]
    reasons: dict[str, str]  # lists that no words describe
    large: set[str]  # lists that ranks gain from sharing
    between: Between | None
    each_call: str
    tap: Tap


def look(model: nn.Module, call: Call, tap: Tap) -> LookedAt:
    """Look at one call. Raises NotFoundError for what no plan describes."""
    structure = CallWatch(keep=lambda path: False)
    with torch.inference_mode(), structure.of(model), tap(structure.real):
        call()
    blocks = find_lists(model, structure.calls)
    each_call = each_call_of(blocks, structure.calls)
    wanted = {path for each in blocks for path in each.paths}
    watch = CallWatch(keep=lambda path: path in wanted)
    with torch.inference_mode(), watch.of(model), tap(watch.real):
        call()
    seen = find_lists(model, watch.calls)
    _refuse_other_order(seen, [each.paths for each in blocks])
    found, reasons = dict[str, ListWords](), dict[str, str]()
    for each in seen:
        try:
            found[each.path] = find_list(each, tap)
        except NotFoundError as error:
            reasons[each.path] = str(error)
    large = {each.path for each in seen if each.large}
    if not large & found.keys():
        raise NotFoundError(next(reasons[path] for path in reasons if path in large))
    between = None if each_call else Between(model, call, tap, [found[path] for path in found if path in large])
    return LookedAt(found, reasons, large, between, each_call, tap)


def plans(seen: Sequence[LookedAt]) -> Iterator[Candidate]:
    """Plans that explain these calls, the one that cuts most first."""
    large = set().union(*(each.large for each in seen))
    merged: dict[str, ListWords] = {}
    used: list[LookedAt] = []
    for each in sorted(seen, key=_richness, reverse=True):
        here = {path: words for path, words in each.lists.items() if path in large}
        if used and not _has_flows_of(here, merged):
            continue  # one with fewer streams tells nothing of the others; the proof includes it
        merged = merge_calls(merged, here)
        used.append(each)
    each_call = next((each.each_call for each in seen if each.each_call), "")
    betweens = [
        (each.between, [each.lists[path] for path in merged])
        for each in used
        if each.between is not None and merged.keys() <= each.lists.keys()
    ]
    yield from candidates(list(merged.values()), betweens, seen[0].tap, each_call)


def _richness(each: LookedAt) -> tuple[int, int]:
    return len(each.lists), sum(len(words.flows) for words in each.lists.values())


def _has_flows_of(here: Mapping[str, ListWords], merged: Mapping[str, ListWords]) -> bool:
    return all(path not in merged or words.keys == merged[path].keys for path, words in here.items())


def _refuse_other_order(found: Sequence[object], before: Sequence[Sequence[str]]) -> None:
    now = [getattr(each, "paths", None) for each in found]
    if now != list(before):
        raise NotFoundError("its blocks run in another order in each call")
