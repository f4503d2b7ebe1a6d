"""Plans that nobody wrote: the one that the pack ships, else one that is looked for when a file of its class is first
loaded and its tokens are to be shared.

Owns when a process looks (parallel_runtime/planner/finding.py), for how long, and what the user is told of it. What is
found counts for calls that the prover has proven (proof/proving.py).
"""

import logging
import os
from dataclasses import dataclass, field, replace

import torch

from ....parallel_runtime.models.specs import may_be_found
from ....parallel_runtime.models.specs.found import (
    Found,
    FoundKey,
    found_specs,
    give_found,
    key_in,
    key_of,
    none_found,
    of_report,
    shipped_spec_of,
    to_text,
)
from ....parallel_runtime.planner.comfyui_process import OPTIONS, NoAnswerError
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
    """`unkept`: what is known of classes that this process looked at and no file says: of those that it did not look at
    to the end, which it does not begin again, and of all where no file can be written."""

    unkept: dict[FoundKey, Found] = field(default_factory=dict)

    def news(self) -> int:
        """Of how many of them another process has kept something since."""
        kept = found_specs()
        return sum(kept.load(key) is not None for key in self.unkept)

    def state(self) -> object:
        """Another one whenever something more is known."""
        try:
            changed = found_specs().path.stat().st_mtime_ns
        except OSError:
            changed = 0
        return changed, len(self.unkept)

    def with_found(self, source: HostedSource, *, look: bool = True) -> HostedSource:
        """A source whose ranks can share its tokens by what was found for its class, where nobody wrote a plan and one
        is found, or that says why not.

        `look`: to look for up to `LIMIT_S` where nothing is known. Raises what ComfyUI raises when the user cancels.
        """
        transformer = source.model.diffusion_model
        key = key_of(type(transformer)) if may_be_found(type(transformer)) else None
        if key is None:
            return source
        found = None
        for known in (shipped_spec_of(type(transformer)), found_specs().load(key)):
            misfit = _given(transformer, known) if known is not None and known.spec is not None else ""
            if misfit:
                log.warning("a plan that is kept for %s is not used: %s", key.model_class, misfit)
            elif known is not None:
                found = known
                break
        if found is None:
            found = self.unkept.get(key) or (self._looked(source, key) if look else UNSEEN)
        unshared = _given(transformer, found)
        if unshared:
            return replace(source, unshared=unshared)
        spec = replace(source.spec, found=to_text(found.spec))
        return replace(source, spec=spec, unshared="", found_by=found.told)

    def _looked(self, source: HostedSource, key: FoundKey) -> Found:
        node, name = NodeText(), key.model_class.rpartition(".")[2]
        log.info("nobody wrote a plan for %s: looking at its calls for up to %g s", name, LIMIT_S)
        next_s = 0

        def tick(since_s: float) -> None:
            nonlocal next_s
            check_cancelled()
            if since_s >= next_s:
                node.say(f"looking how ranks can share an image of {name}: {next_s} s of at most {LIMIT_S:g} s")
                next_s = int(since_s) + 1

        comfyui = replace(this_comfyui(), options=OPTIONS)
        try:
            report = find_plan(source.spec.path, comfyui, checkpoint=source.spec.checkpoint, limit_s=LIMIT_S, tick=tick)
        except ValueError as error:
            why = redact_paths(str(error).partition("\n")[0])
            if isinstance(error, NoAnswerError):
                file = os.path.basename(source.spec.path)
                why += (
                    f"; `python -m parallel_runtime find-plan {file}` in the pack's folder looks without a limit, and "
                    "the next load uses what it finds"
                )
            found = self.unkept[key] = none_found(why)
        else:
            found, same = of_report(report), key == key_in(report)
            if not same:
                found = none_found(f"a process of its own takes the file for {report['class']}")
            if not same or not report["kept"]:
                self.unkept[key] = found
        log.info("%s: %s", name, found.why or f"found, proven: {found.told}")
        return found


def _given(transformer: torch.nn.Module, found: Found) -> str:
    """Why ranks cannot share its tokens by what was found; the transformer has it from now on."""
    give_found(transformer, found)
    return why_unshared(transformer)


LOOKING = SpecSearch()
