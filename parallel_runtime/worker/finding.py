"""Finds and proves the plan of a file's class: `python -m parallel_runtime.worker.finding` is that process.

It answers as models/hosted/reference.py does, and one question more. Of each list of blocks the first and the last
stay, and the file's own weights are views of the file, so a model of any size takes the memory of two blocks a list.
Owns which calls are looked at and which are proven. Does not own what is found of them (models/finder).
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import ModelSpec, read_header
from ..errors import in_one_line, note_module
from ..mapped_file import MappedFile
from ..models.finder import Candidate, LookedAt, NotFoundError, look, plans
from ..models.hosted.build import Recognised, build, recognise
from ..models.hosted.finding import attention_to
from ..models.hosted.kept_state import forget_keys
from ..models.hosted.random_calls import Size, asks_for, call_of, find_widths, flat, latent_shapes
from ..models.hosted.reference import QUESTIONS, Reference, serve
from ..models.specs.found import key_of
from ..models.specs.spec import ShardingSpec
from ..models.specs.written import from_data, to_data
from ..proof import CONTROL, TOLERANCES
from .forked_ranks import RanksDisagreeError, RanksLostError, errors_of
from .put_back import put_back

log = logging.getLogger(__name__)
RANKS = (2, 3)
SHARE_OF_PLAIN = 3  # of the time that is there, calls of a text alone may take one part, or no others are looked at
LOOKED_AT = (Size(width=320, height=192, text_tokens=11, batch=1, seed=1), 13)  # and the text's other length
PROVEN = (Size(width=192, height=256, text_tokens=19, batch=2, seed=2), 7)
# A class that takes none of these takes one image a call, as MiniMax H3 does, or larger ones, as PixArt does.
OTHERWISE: tuple[dict[str, int], ...] = ({}, {"batch": 1}, {"scale": 2})
TOLERANCE = TOLERANCES["float32"]
Calls = list[Callable[[], torch.Tensor]]


class Finding(Reference):
    """Answers the reference's questions, and `find`: the plan of a file's class."""

    questions = (*QUESTIONS, "find")
    sizes: tuple[Size, Size] = (LOOKED_AT[0], PROVEN[0])  # of the calls that the class takes

    def find(self, path: str, checkpoint: bool = False, limit_s: float | None = None) -> dict[str, Any]:
        """The plan of a file's class, and its proof: over 2 and 3 ranks against this process, of another size than was
        looked at, and with two other texts.

        `with`: of `random_calls.MORE`, the kinds of calls that it was proven for besides; none are tried where an
        answer is wanted within `limit_s` and these took long. `refused`: why there is none, naming the module. Raises
        `ValueError` for a file that is none of ComfyUI's, and for a model that no random call can be made of.
        """
        self.path, self.checkpoint = path, checkpoint
        began, computed = time.perf_counter(), _computed_s()

        def took_s() -> float:  # while others have the CPU, less than the clock says
            return min(time.perf_counter() - began, _computed_s() - computed)

        model, looked_at, proven, whole = self._calls()
        kind, key = type(model), key_of(type(model))
        told: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}", "source": key.source if key else ""}
        told |= {"kind": self.kind, "tried": [], "refused": "", "with": []}
        try:
            with torch.inference_mode():
                with put_back(model):
                    seen = [look(model, call, attention_to) for call in looked_at]
                told |= self._first_proven(model, seen, proven, told["tried"])
                if "plan" in told and (limit_s is None or took_s() <= limit_s / SHARE_OF_PLAIN):
                    told |= self._of_more(model, whole, seen, proven, told)
        except NotFoundError as error:
            told["refused"] = str(error)
        except (RanksLostError, MemoryError):
            raise
        except Exception as error:
            note_module(error, model)
            raise ValueError(f"looking at {kind.__name__} ended with {in_one_line(error)}") from error
        if not told["refused"] and "plan" not in told:
            last = told["tried"][-1] if told["tried"] else "none explains its calls"
            told["refused"] = f"no plan was equal to one process; the last: {last}"
        return told | {"seconds": time.perf_counter() - began}

    def _first_proven(self, model: nn.Module, seen: list[LookedAt], calls: Calls, tried: list[str]) -> dict[str, Any]:
        with put_back(model):
            wanted = [call() for call in calls]
        if not all(want.isfinite().all() and want.any() for want in wanted):
            raise NotFoundError(f"{type(model).__name__} computes nothing finite in float32, so no proof can see it")
        for candidate in _each(plans(seen), model):
            try:
                found = [errors_of(model, candidate.spec, calls, wanted, ranks) for ranks in RANKS]
            except RanksDisagreeError as raised:
                tried.append(f"{candidate.cuts}: {' '.join(str(raised).split())[:300]}")
                continue
            error = max(each for errors, _ in found for each in errors)
            control = min(least for _, least in found)
            if not error <= TOLERANCE:
                tried.append(f"{candidate.cuts}: relative error {error:.1e}, at most {TOLERANCE:.1e}")
                continue
            if control <= CONTROL * TOLERANCE:
                raise NotFoundError(
                    f"{type(model).__name__}: its output does not depend on its attention, so a proof has nothing to "
                    f"see: without exchange the error is {control:.1e}"
                )
            proof = {"cuts": candidate.cuts, "error": error, "control": control}
            return {"plan": to_data(candidate.spec), "rests_on": rests_on(seen), **proof}
        return {}

    def _of_more(
        self,
        model: nn.Module,
        whole: Any,  # noqa: ANN401  a comfy.model_base.BaseModel
        seen: list[LookedAt],
        proven: Calls,
        told: dict[str, Any],
    ) -> dict[str, Any]:
        """The plan, or another one, that holds for calls with references, masks or masked texts too, and for which.

        A call of a kind that none holds for is proven when one comes, as every call is, and goes on without the plan.
        """
        kinds = []
        with put_back(model):
            asked = kinds_of(whole, self.sizes[0])
        for kind in asked:
            try:
                with put_back(model):
                    looked_at, more = (calls_of(whole, replace(each, more=(kind,)))[0] for each in self.sizes)
                if not _holds(model, from_data(told["plan"]), more):
                    with put_back(model):
                        here = [*seen, look(model, looked_at, attention_to)]
                    found = self._first_proven(model, here, [*proven, more], [])
                    if not found:
                        continue
                    seen, told = here, found
            except (RanksLostError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001  a class may raise anything for what it was not made for
                log.info("no plan holds for calls with %s too: %s", kind, in_one_line(error))
                continue
            proven = [*proven, more]
            kinds.append(kind)
        return told | {"with": kinds}

    def _recognise(self) -> Recognised:
        """By views of the file, as ranks have it: it may be larger than the memory."""
        header, self._file = read_header(self.path), MappedFile(ModelSpec.of(self.path))
        tensors = {name: self._file.tensor(entry) for name, entry in header.tensors.items()}
        recognised = recognise(self.path, tensors, header.metadata, checkpoint=self.checkpoint)
        self.kind = recognised.kind
        return recognised

    def _calls(self) -> tuple[nn.Module, Calls, Calls, Any]:
        """The file's model with two blocks in each list, calls to look at and calls to prove; ComfyUI's BaseModel.

        With all of its blocks where a class does not run without some.
        """
        said = ""
        for short in (True, False):
            recognised = self._recognise()
            built = build(self.path, recognised, torch.float32)
            built.round_here()
            if short:
                shorten(built.module)
            for changed in OTHERWISE:
                first, second = (_changed(each[0], **changed) for each in (LOOKED_AT, PROVEN))
                self.sizes = first, second
                try:
                    with put_back(built.module):
                        looked_at = calls_of(built.whole, first, *LOOKED_AT[1:])
                        proven = calls_of(built.whole, second, *PROVEN[1:])
                        with torch.inference_mode():
                            looked_at[0]()
                            proven[0]()
                except Exception as error:  # noqa: BLE001  a class may raise anything for a size that it does not take
                    note_module(error, built.module)
                    said = said or in_one_line(error)
                    log.info("with %s the model does not run: %s", changed or "usual sizes", error)
                    continue
                return built.module, looked_at, proven, built.whole
            log.info("with %s blocks a list the model does not run", "two" if short else "all")
        raise ValueError(f"no call of {type(built.module).__name__} can be made: {said}")


def _holds(model: nn.Module, spec: ShardingSpec, call: Callable[[], torch.Tensor]) -> bool:
    """Whether a plan holds for one more call."""
    with put_back(model):
        wanted = [call()]
    try:
        return all(errors_of(model, spec, [call], wanted, ranks)[0][0] <= TOLERANCE for ranks in RANKS)
    except RanksDisagreeError:
        return False


def _each(candidates: Iterable[Candidate], model: nn.Module) -> Iterator[Candidate]:
    """Each of them; more calls of the model may be looked at for the next."""
    left = iter(candidates)
    while True:
        with put_back(model):
            candidate = next(left, None)
        if candidate is None:
            return
        yield candidate


def _computed_s() -> float:
    """CPU seconds of this process and of ranks of its own that have ended."""
    return sum(os.times()[:4])


def rests_on(seen: Sequence[LookedAt]) -> list[str]:
    """What was seen of each list of blocks, a line each."""
    lines = []
    for path, each in seen[0].lists.items():
        blocks, tokens = each.blocks, ", ".join(f"{flow.name} {flow.tokens}" for flow in each.flows)
        shared = "" if path in seen[0].large else "; few tokens, so every rank computes all of them"
        lines.append(f"{path}: {len(blocks.paths)} blocks, tokens handed on: {tokens}{shared}")
    return lines + [f"{path} is computed whole: {why}" for path, why in seen[0].reasons.items()]


def shorten(model: nn.Module) -> None:
    """Leave the first and the last of each list of modules of one class, which are not in another such list."""
    done: list[str] = []
    for path, module in list(model.named_modules()):
        alike = isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
        if alike and len(module) > 2 and not any(path.startswith(f"{each}.") for each in done):
            del module[1:-1]
            done.append(path)


def _changed(size: Size, batch: int | None = None, scale: int = 1) -> Size:
    return replace(size, width=scale * size.width, height=scale * size.height, batch=batch or size.batch)


def kinds_of(whole: Any, size: Size) -> list[str]:  # noqa: ANN401  a comfy.model_base.BaseModel
    """What graphs give besides a text that this model makes something of."""
    device = torch.device("cpu")
    return asks_for(whole, size, latent_shapes(whole, size), find_widths(whole, size, device))


def calls_of(whole: Any, size: Size, *other_texts: int) -> Calls:  # noqa: ANN401  a comfy.model_base.BaseModel
    """Calls of one size, with texts of several lengths, as the two sides of cfg have them."""
    device = torch.device("cpu")
    shapes, widths = latent_shapes(whole, size), find_widths(whole, replace(size, more=()), device)
    sizes = [size, *(replace(size, text_tokens=tokens, seed=size.seed + 10) for tokens in other_texts)]
    return [partial(_flat, call_of(whole, each, shapes, widths, device), whole, size.batch) for each in sizes]


def _flat(call: Callable[..., Any], whole: Any, rows: int) -> torch.Tensor:  # noqa: ANN401
    forget_keys(whole.diffusion_model)
    return flat(call(), rows)


def main() -> None:
    """Answer until the other side goes."""
    with suppress(OSError):  # when memory runs out, the kernel should take this process, and not ComfyUI's
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    serve(Finding())


if __name__ == "__main__":
    main()
