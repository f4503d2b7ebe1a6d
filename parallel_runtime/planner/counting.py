"""What the planner must be told of a model that ComfyUI's own module computes: asked of a process that counts it.

Owns the asking, and that a file is counted once. What is counted is models/hosted/count.py's, how that is kept on the
disk kept_counts.py's.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from ..checkpoint import ComfyUI
from .automatic import usual_work
from .comfyui_process import TICK_S, ComfyUIProcess, NoAnswerError, NotStartedError
from .counted import CountedModel, Polynomial
from .kept_counts import CountKey, KeptCounts, count_key
from .work import Work

USUAL = Path(__file__).with_name("usual.json")  # what was counted of Flux.1 dev in bf16, at the usual size
USUAL_NAME = "flux1-dev"
USUAL_SIZE = {"width": 1024, "height": 1024, "text_tokens": 512, "batch": 1, "seed": 0, "frames": None}
Key: TypeAlias = tuple[str, int, int, str, ComfyUI, str | None, tuple[tuple[str, object], ...]]
Tick: TypeAlias = Callable[[float], None]  # called with the seconds since it began; what it raises ends the counting


@dataclass(frozen=True)
class Counted:
    """A model as it was counted at one size.

    `numbers`: of a row's latent of that size; `element_bytes`: of an activation; `frames`: of a video of that size, 1
    for an image.
    """

    model: CountedModel
    numbers: int
    element_bytes: int
    frames: int = 1

    @classmethod
    def of(cls, name: str, said: Mapping[str, Any]) -> "Counted":
        """The answer of the process that counts. Raises `ValueError` for one that lacks something of the model."""
        model = CountedModel.of(name, said)
        return cls(model, int(said["numbers"]), int(said["element_bytes"]), int(said.get("frames", 1)))

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; `of` is the inverse, but for the name."""
        return {
            **asdict(self.model),
            "numbers": self.numbers,
            "element_bytes": self.element_bytes,
            "frames": self.frames,
        }

    def with_weights(self, num_bytes: int) -> "Counted":
        """The same model with weights of so many bytes, as one keeps them in another dtype than the file's."""
        part = num_bytes / self.model.weight_bytes
        blocks = tuple(round(part * each) for each in self.model.block_bytes)
        small = self.model.small_numbers or part <= 0.5  # it was counted with numbers of two bytes
        model = replace(self.model, weight_bytes=num_bytes, block_bytes=blocks, small_numbers=small)
        return replace(self, model=model)

    def with_elements(self, num_bytes: int) -> "Counted":
        """The same model with activations of so many bytes an element."""
        part, model = num_bytes / self.element_bytes, self.model

        def scaled(counts: Mapping[str, Polynomial]) -> dict[str, Polynomial]:
            times = {name: part if name.endswith("_bytes") else 1.0 for name in counts}
            return {name: tuple(times[name] * each for each in counts[name]) for name in counts}

        model = replace(model, whole=scaled(model.whole), shared=scaled(model.shared))
        return replace(self, model=model, element_bytes=num_bytes)

    @property
    def image_tokens(self) -> int:
        """Tokens of that latent."""
        return self.model.image_tokens(self.numbers)


class Counts:
    """Counts of files, by what they are on the disk; each is counted once, however many callers ask meanwhile.

    `kept`: those of earlier processes, of files whose plan the caller says.
    """

    def __init__(self, kept: KeptCounts | None = None) -> None:
        self._kept = kept
        self._known: dict[Key, Counted | str] = {}  # or why it cannot be counted
        self._unanswered: dict[Key, tuple[float, str]] = {}  # when there was no answer last, and why
        self._turns: dict[Key, Lock] = {}

    def of(
        self,
        path: str,
        dtype: str,
        comfyui: ComfyUI,
        *,
        found: str | None = None,
        tick: Tick | None = None,
        **size: object,
    ) -> Counted:
        """The counts of a file, computed in `dtype` or ComfyUI's "default"; `size` as `USUAL_SIZE`, where it differs.

        `found`: the plan that was found for its class (`ModelSpec.found`), None for what the user has kept.
        Takes seconds; a model whose forward reads values is computed in small calls, which takes longer. Raises
        `ValueError` for a file that is not there, that ComfyUI does not know or that cannot be counted, and what `tick`
        raises.
        """
        key, asked, began_s = _key(path, dtype, comfyui, found, size), {**USUAL_SIZE, **size}, time.monotonic()
        with self._turn(key, tick):
            ended_s, why = self._unanswered.get(key, (-math.inf, ""))
            if ended_s > began_s:  # this one has waited for it
                raise NoAnswerError(why)
            if key not in self._known:
                try:
                    self._known[key] = self._loaded(key) or self._saved(
                        key, _count(path, dtype, comfyui, found, asked, tick)
                    )
                except (NoAnswerError, NotStartedError) as error:  # as for want of memory, which there may be next time
                    self._unanswered[key] = time.monotonic(), str(error)
                    raise
                except ValueError as error:  # it would be refused again; the error itself holds what its callers held
                    self._known[key] = str(error)
            known = self._known[key]
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def _loaded(self, key: Key) -> Counted | None:
        """What an earlier process counted; None where that cannot be used."""
        kept_by = _kept_key(key)
        known = None if self._kept is None or kept_by is None else self._kept.load(kept_by)
        try:
            return None if known is None else Counted.of(os.path.basename(key[0]), known)
        except (KeyError, TypeError, ValueError):
            return None

    def _saved(self, key: Key, known: Counted) -> Counted:
        """The same, kept for later processes."""
        kept_by = _kept_key(key)
        if self._kept is not None and kept_by is not None:
            self._kept.save(kept_by, known.to_dict())
        return known

    @property
    def files(self) -> int:
        """How many were counted, at whatever size."""
        return len(self._known)

    def known(self, path: str, dtype: str, comfyui: ComfyUI, *, found: str | None = None) -> Counted | None:
        """The counts at the usual size if the file was counted already; None where it was not, or cannot be."""
        try:
            known = self._known.get(_key(path, dtype, comfyui, found, {}))
        except ValueError:  # it is not there any more
            return None
        return None if isinstance(known, str) else known

    @contextmanager
    def _turn(self, key: Key, tick: Tick | None) -> Iterator[None]:
        """While no other thread counts this; raises what `tick` raises."""
        turn, began_s = self._turns.setdefault(key, Lock()), time.monotonic()
        while not turn.acquire(timeout=TICK_S):
            if tick is not None:
                tick(time.monotonic() - began_s)
        try:
            yield
        finally:
            turn.release()


@lru_cache(maxsize=1)
def usual_counted() -> Counted:
    """The model for which plans are shown before anybody knows the file."""
    return Counted.of(USUAL_NAME, json.loads(USUAL.read_text(encoding="utf-8")))


def usual_work_of(counted: Counted) -> Work:
    """The work that a plan is chosen for before anybody knows the picture."""
    return replace(
        usual_work(element_bytes=counted.element_bytes), image_tokens=counted.image_tokens, frames=counted.frames
    )


def _key(path: str, dtype: str, comfyui: ComfyUI, found: str | None, size: Mapping[str, object]) -> Key:
    """Raises `ValueError` for a file that is not there."""
    asked = tuple(sorted({**USUAL_SIZE, **size}.items()))
    try:
        now = os.stat(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be counted: {error.strerror}; put the file back, or choose another") from error
    return path, now.st_size, now.st_mtime_ns, dtype, comfyui, found, asked


def _kept_key(key: Key) -> CountKey | None:
    """By what counts are kept on the disk; None where the plan of the file's class is not given, and where it cannot
    be told what they hold for."""
    path, num_bytes, changed_ns, dtype, comfyui, found, size = key
    try:
        return None if found is None else count_key(path, num_bytes, changed_ns, dtype, comfyui, found, size)
    except (OSError, PackageNotFoundError):
        return None


def _count(
    path: str, dtype: str, comfyui: ComfyUI, found: str | None, size: dict[str, object], tick: Tick | None
) -> Counted:
    with ComfyUIProcess(comfyui, "cpu", counting=True, tick=tick) as process:
        said = process.ask("count", path=os.path.abspath(path), dtype=dtype, size=size, found=found)
    return Counted.of(os.path.basename(path), said)
