"""Plans that were found, kept between runs: one small JSON file, an entry for each class of each ComfyUI.

Owns the file `found_plans.json` in the user's cache folder (user_files.py), how a model carries what was found of it,
and in which order plans come (`found_spec_of`). An entry holds for the source of the class and of what it is made of,
for ComfyUI's version, and for files of one kind; a class's plan serves files of other kinds until a proof refuses it
there, and then one is looked for with such a file: `instead_of` says which plans were refused. Where none was found the
entry has the reason, which holds for such files and for the finder that looked. Entries from before have no kind.

    {"version": 1, "plans": {"2f1c...": {"key": {...}, "cuts": "cut once", "errors": {...}, "plan": {...}},
                             "9a04...": {"key": {...}, "refused": "blocks.0.attn mixes tokens: ...", "finder": "77ab"}}}

The pack ships some, in a file for each class (`shipped/comfy.ldm.new.model.New.json`) that has an entry for each source
of it: `{"plans": {"81c2...": {"from": "...", "cuts": ..., "errors": ..., "plan": ...}}}`. They come first, proven
before they count as those that were found here are. `python -m tools.ship_plans` writes them.
"""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...user_files import Key, Store, read_json
from .spec import ShardingSpec
from .written import from_data, to_data

log = logging.getLogger(__name__)
ATTRIBUTE = "_parallel_found_plan"  # of a model's instance
# What looks and proves: what another one refused may be found now.
FINDER = (
    *("models/finder", "models/hosted/finding.py", "models/hosted/random_calls.py"),
    *("worker/finding.py", "worker/forked_ranks.py", "worker/put_back.py"),
)
KEPT = 100  # entries; the oldest go first
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, kw_only=True)
class FoundKey(Key):
    """What a found plan holds for.

    `source`: a hash of the files in the folder of the class's, and of ComfyUI's attention; `kind`: of what ComfyUI
    takes a file for (`Recognised.kind`).
    """

    model_class: str
    source: str
    comfyui: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What looking at a class gave: a plan, or None and why there is none.

    `told`: what the plan was proven by; `instead_of`: the hashes of plans that a proof refused for files of its kind.
    """

    spec: ShardingSpec | None = None
    why: str = ""
    told: str = ""
    instead_of: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of its plan."""
        return hashlib.sha256(to_text(self.spec).encode()).hexdigest()[:16]


def none_found(why: str) -> Found:
    """That there is none."""
    return Found(why=f"no plan was found: {why}")


def key_in(report: Mapping[str, Any]) -> FoundKey:
    """What it holds for."""
    same = {name: report[name] for name in ("source", "comfyui", "kind")}
    return FoundKey(model_class=report["class"], **same)


def of_report(report: Mapping[str, Any]) -> Found:
    """What planner/finding.py reports."""
    if report["refused"]:
        return none_found(report["refused"])
    return Found(spec=from_data(report["plan"]), told=told_by(report["cuts"], report))


def plan_in(entry: Mapping[str, Any], model_class: str, path: Path) -> Found | None:
    """The plan of a class in an entry of the file at `path`; None, and a line in the log, for one that is damaged."""
    try:
        told, passed = told_by(str(entry["cuts"]), {**entry["errors"]}), tuple(entry.get("instead_of", ()))
        return Found(spec=from_data(entry.get("plan")), told=told, instead_of=passed)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the plan of %s in %s is not used: %s", model_class, path, error)
        return None


def give_found(model: object, found: Found) -> None:
    """Have `spec_of` of this model say what was found, where its class has no written plan."""
    vars(model)[ATTRIBUTE] = found


def found_of(model: object) -> Found | None:
    """What was given to the model."""
    found: Found | None = vars(model).get(ATTRIBUTE)
    return found


def told_by(cuts: str, errors: Mapping[str, float]) -> str:
    """How a plan cuts and what it was proven by, in a line."""
    return f"{cuts}, relative error {errors['error']:.1e}, without exchange {errors['control']:.1e}"


def to_text(spec: ShardingSpec | None) -> str:
    """A found plan as ranks are told it, "" for none."""
    return "" if spec is None else json.dumps(to_data(spec), sort_keys=True)


def of_text(text: str) -> Found:
    """Back. Raises `ValueError` for anything else."""
    try:
        return Found(spec=from_data(json.loads(text)))
    except RecursionError as error:
        raise ValueError("it is no plan: it is too deep; find it again") from error


class FoundSpecs(Store):
    """The entries of one file."""

    FILE, NAME, VERSION, MOST = "found_plans.json", "plans", 1, KEPT
    THEN = "plans are found anew"

    def load(self, key: FoundKey) -> Found | None:
        """What is kept for the key; None when there is nothing that can be used."""
        entry = self.entries.of(key)
        if entry is None:
            return None
        if isinstance(why := entry.get("refused"), str):
            return none_found(why) if entry.get("finder") == finder_source() else None
        return plan_in(entry, key.model_class, self.path)

    def of_others(self, key: FoundKey) -> Found | None:
        """The plan that was found last for the class with a file of another kind; None for none."""
        for entry in reversed(self.entries.all().values()):
            its = entry.get("key") if isinstance(entry, dict) and "plan" in entry else None
            if isinstance(its, dict) and its != asdict(key) == {**its, "kind": key.kind}:
                return plan_in(entry, key.model_class, self.path)
        return None

    def pass_over(self, key: FoundKey, refused: Found) -> bool:
        """Keep that a proof refused another plan for files of the key's kind, which has a plan of its own; False where
        it has none, or the folder cannot be written."""
        entry = self.entries.all().get(key.digest, {})
        if "plan" not in entry:
            return False
        return self.keep(key, {**entry, "instead_of": [*entry.get("instead_of", ()), refused.digest]})

    def save(self, key: FoundKey, spec: ShardingSpec, *, cuts: str, errors: Mapping[str, float]) -> bool:
        """Keep it; False where the folder cannot be written. `errors`: of the proof, by what was computed: `error` and
        `control`."""
        return self.keep(key, {"cuts": cuts, "errors": dict(errors), "plan": to_data(spec)})

    def save_refusal(self, key: FoundKey, why: str) -> bool:
        """Keep why there is none, so that no process looks again; False where the folder cannot be written."""
        return self.keep(key, {"refused": why, "finder": finder_source()})


def file_of(model_class: type) -> str | None:
    """Where a class's source is."""
    file: str | None = getattr(sys.modules.get(model_class.__module__), "__file__", None)
    return file


def path_of(model_class: type) -> str:
    """The dotted path of a class."""
    return f"{model_class.__module__}.{model_class.__qualname__}"


def key_of(model_class: type, kind: str = "") -> FoundKey | None:
    """The key of files of a kind and a class of a ComfyUI's that is imported; None for a class of anything else."""
    file = file_of(model_class)
    if file is None:
        return None
    root = next((each for each in Path(file).parents if (each / "comfy" / "model_base.py").is_file()), None)
    if root is None:
        return None
    version = root / "comfyui_version.py"
    said = re.search(r'__version__ = "([^"]*)"', version.read_text(encoding="utf-8")) if version.is_file() else None
    source = source_of_folder(Path(file), root)
    return FoundKey(model_class=path_of(model_class), source=source, comfyui=said[1] if said else "", kind=kind)


def source_of_folder(file: Path, root: Path) -> str:
    """A hash of the files in the folder of a class's, and of the attention of the ComfyUI in the folder `root`."""
    found = hashlib.sha256()
    beside = sorted(filter(Path.is_file, file.parent.glob("*.py")))  # editors leave links that lead nowhere
    for each in (*beside, root / "comfy" / "ldm" / "modules" / "attention.py"):
        found.update(each.name.encode() + each.read_bytes())
    return found.hexdigest()[:16]


@cache
def finder_source() -> str:
    """A hash of the code that finds and proves plans."""
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for place in (root / name for name in FINDER):
        for file in [place] if place.is_file() else sorted(place.glob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def found_spec_of(
    model_class: type, kind: str = "", *, fits: Callable[[Found], bool] = lambda _: True, known: Found | None = None
) -> Found | None:
    """What is known of files of a kind and a class of a ComfyUI's that is imported; None for nothing that `fits`.

    The plan that the pack ships, else the one that was found with such a file, else the one that was found with
    another: the first that no proof refused for such a file (`instead_of`). Without any, why none was found with such a
    file. `known`: what of such files no file says.
    """
    key = key_of(model_class, kind)
    if key is None:
        return None
    own = found_specs().load(key) or known
    plans = (shipped_spec_of(model_class), own, found_specs().of_others(key))
    passed = {digest for each in (own, known) if each is not None for digest in each.instead_of}
    usable = (each for each in plans if each is not None and each.spec is not None and each.digest not in passed)
    return next(filter(fits, usable), None if own is None or own.spec is not None else own)


def shipped_spec_of(model_class: type) -> Found | None:
    """What the pack ships for the source of a class of a ComfyUI's that is imported; None for nothing."""
    name, source = path_of(model_class), file_of(model_class)
    try:
        content = read_json(file := SHIPPED / f"{name}.json")
    except FileNotFoundError:
        return None
    plans = content.get("plans") if isinstance(content, dict) else None
    entry = plans.get(class_source(Path(source))) if isinstance(plans, dict) and source is not None else None
    return plan_in(entry, name, file) if isinstance(entry, dict) else None


def class_source(file: Path) -> str:
    """A hash of the file that a class is in, whatever ends its lines."""
    return hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest()[:16]


def found_specs() -> FoundSpecs:
    """The user's file."""
    return FoundSpecs.of_user()
