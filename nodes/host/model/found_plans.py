"""Plans that are not written by hand: one that is known, else one that is looked for when a file is first loaded and
its tokens are to be shared; and another where a proof refuses one that was not found with a file of this kind.

Owns when a process looks (parallel_runtime/planner/finding.py), for how long, and what the user is told of it. What is
found counts for calls that the prover has proven (proof/proving.py). Does not own the order of plans
(parallel_runtime/models/specs/found.py).
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ....parallel_runtime.checkpoint import ModelSpec
from ....parallel_runtime.models.specs import may_be_found
from ....parallel_runtime.models.specs.found import (
    Found,
    FoundKey,
    found_spec_of,
    found_specs,
    give_found,
    key_in,
    key_of,
    none_found,
    of_report,
    of_text,
    to_text,
)
from ....parallel_runtime.planner.comfyui_process import CLOCK, OPTIONS, NoAnswerError
from ....parallel_runtime.planner.finding import find_plan
from ....parallel_runtime.redact_paths import redact_paths
from ..contract.comfyui import check_cancelled
from ..panel.progress import NodeText
from .source import HostedSource, this_comfyui, why_unshared

log = logging.getLogger(__name__)
LIMIT_S = 30.0
UNSEEN = Found(why="nobody wrote a plan for it; one is looked for when the file is loaded")


@dataclass(frozen=True)
class SpecSearch:
    """What this process knows of plans that were looked for, beyond what the user's file says.

    `unkept`: of kinds of files that no file says: those whose search did not end, which does not begin again, and all
    where no file can be written. `replaced`: the kinds whose plan replaced another in a run, and the other's hash.
    """

    unkept: dict[FoundKey, Found] = field(default_factory=dict)
    replaced: set[tuple[FoundKey, str]] = field(default_factory=set)

    def news(self) -> int:
        """Another one where a MODEL's plan, and what was predicted by it, may not be what a load would find now:
        another process has kept what no file said, or a proof refused a plan."""
        kept = found_specs()
        return sum(kept.load(key) is not None for key in self.unkept) + len(self.replaced)

    def state(self) -> object:
        """Another one whenever something more is known."""
        try:
            changed = found_specs().path.stat().st_mtime_ns
        except OSError:
            changed = 0
        return changed, len(self.unkept)

    def with_found(self, source: HostedSource, *, look: bool = True) -> HostedSource:
        """A source whose ranks can share its tokens by what was found for its class, where no plan is written and one
        is found, or that says why not.

        `look`: to look for up to `LIMIT_S` where nothing is known. Raises what ComfyUI raises when the user cancels.
        """
        transformer = source.model.diffusion_model
        kind, file_kind = type(transformer), source.recognised.kind
        key = key_of(kind, file_kind) if may_be_found(kind) else None
        if key is None:
            return source

        def fits(known: Found) -> bool:
            misfit = _given(transformer, known)
            if misfit:
                log.warning("a plan that is kept for %s is not used: %s", key.model_class, misfit)
            return not misfit

        unkept = self.unkept.get(key)
        found = found_spec_of(kind, file_kind, fits=fits, known=unkept) or unkept
        if found is None:
            found = self._looked(source.spec, key, check_cancelled) if look else UNSEEN
        unshared = _given(transformer, found)
        if unshared:
            return replace(source, unshared=unshared)
        spec = replace(source.spec, found=to_text(found.spec))
        return replace(source, spec=spec, unshared="", found_by=found.told)

    def instead_of(
        self, transformer: torch.nn.Module, file_kind: str, spec: ModelSpec, check: Callable[[], None]
    ) -> Found:
        """The plan for files of this kind where a proof refused the one in `spec`, which the transformer has from now
        on; none and why, or no reason where the refused one was found with such a file.

        Looks once for a kind of file, and not for one that was changed since. Raises what `check` raises.
        """
        refused, key = of_text(spec.found), key_of(type(transformer), file_kind)
        if key is None:
            return Found()
        try:
            spec.refuse_changed()
        except ValueError as error:
            return none_found(redact_paths(str(error)))
        own = found_specs().load(key) or self.unkept.get(key) or self._looked(spec, key, check)
        if own.spec is None or own.spec == refused.spec:
            return Found(why=own.why)
        if refused.digest not in own.instead_of and not found_specs().pass_over(key, refused):
            self.unkept[key] = replace(own, instead_of=(*own.instead_of, refused.digest))
        misfit = _given(transformer, own)
        if misfit:
            give_found(transformer, refused)
            return none_found(misfit)
        self.replaced.add((key, refused.digest))
        return own

    def _looked(self, spec: ModelSpec, key: FoundKey, check: Callable[[], None]) -> Found:
        node, name = NodeText(), key.model_class.rpartition(".")[2]
        log.info("nobody wrote a plan for %s: looking at its calls for up to %g s", name, LIMIT_S)
        next_s = 0

        def tick(since_s: float) -> None:
            nonlocal next_s
            check()
            if since_s >= next_s:
                most_s = LIMIT_S if since_s < LIMIT_S else CLOCK * LIMIT_S
                node.say(f"looking how ranks can share an image of {name}: {next_s} s of at most {most_s:g} s")
                next_s = int(since_s) + 1

        comfyui = replace(this_comfyui(), options=OPTIONS)
        try:
            report = find_plan(spec.path, comfyui, checkpoint=spec.checkpoint, limit_s=LIMIT_S, tick=tick)
        except ValueError as error:
            why = redact_paths(str(error).partition("\n")[0])
            if isinstance(error, NoAnswerError):
                file = os.path.basename(spec.path)
                why += (
                    f"; `python -m parallel_runtime find-plan {file}` in the pack's folder looks without a limit, and "
                    "the next load uses what it finds"
                )
            found = self.unkept[key] = none_found(why)
        else:
            found, same = of_report(report), key == key_in(report)
            if not same:
                found = none_found(_otherwise(key, key_in(report)))
            if not same or not report["kept"]:
                self.unkept[key] = found
        log.info("%s: %s", name, found.why or f"found, proven: {found.told}")
        return found


def _otherwise(key: FoundKey, seen: FoundKey) -> str:
    """Why what a process of its own saw is not of the class and file that were asked about."""
    if seen.model_class != key.model_class:
        return f"a process of its own takes the file for {seen.model_class}"
    if seen.kind != key.kind:
        return "a process of its own takes the file for another kind of its class; load it again"
    return "ComfyUI's files were changed meanwhile; restart ComfyUI"


def _given(transformer: torch.nn.Module, found: Found) -> str:
    """Why ranks cannot share its tokens by what was found; the transformer has it from now on."""
    give_found(transformer, found)
    return why_unshared(transformer)


LOOKING = SpecSearch()
