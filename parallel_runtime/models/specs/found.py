"""Plans that were found, kept between runs: one small JSON file, an entry for each class of each ComfyUI.

Owns the file `found_plans.json` in the user's cache folder (user_files.py). An entry holds for the source of the class
and of what it is made of, and for ComfyUI's version; another one is found anew. A file that is damaged, or of another
version, counts as empty and is replaced by the next write.

    {"version": 1, "plans": {"2f1c...": {"key": {...}, "cuts": "cut once", "errors": {...}, "plan": {...}}}}
"""

import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...user_files import read_json, replace_json, user_file
from .spec import ShardingSpec
from .written import from_data, to_data

log = logging.getLogger(__name__)
VERSION, FILE = 1, "found_plans.json"
KEPT = 100  # entries; the oldest go first


@dataclass(frozen=True, kw_only=True)
class FoundKey:
    """What a found plan holds for. `source`: a hash of the files beside the class's, and of ComfyUI's attention."""

    model_class: str
    source: str
    comfyui: str

    @property
    def digest(self) -> str:
        """What the key is found by."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class FoundPlans:
    """The entries of one file."""

    path: Path

    @staticmethod
    def default_path(environ: Mapping[str, str], home: Path) -> Path:
        """The file's place for a user."""
        return user_file(environ, home, FILE)

    def load(self, key: FoundKey) -> ShardingSpec | None:
        """The plan that is kept for the key; None when there is none that can be used."""
        entry = self._entries().get(key.digest)
        if not isinstance(entry, dict) or entry.get("key") != asdict(key):
            return None
        try:
            return from_data(entry.get("plan"))
        except ValueError as error:
            log.warning("the plan of %s in %s is not used: %s", key.model_class, self.path, error)
            return None

    def save(self, key: FoundKey, spec: ShardingSpec, *, cuts: str, errors: Mapping[str, float]) -> bool:
        """Keep it; False where the folder cannot be written. `errors`: of the proof, by what was computed."""
        entry = {"key": asdict(key), "cuts": cuts, "errors": dict(errors), "plan": to_data(spec)}
        entries = {**self._entries(), key.digest: entry}
        try:
            replace_json(self.path, {"version": VERSION, "plans": dict(list(entries.items())[-KEPT:])})
        except OSError as error:
            log.warning("found plans cannot be kept in %s (%s); set XDG_CACHE_HOME", self.path, error.strerror)
            return False
        return True

    def _entries(self) -> dict[str, Any]:
        try:
            content = read_json(self.path)
        except FileNotFoundError:
            return {}
        plans = content.get("plans") if isinstance(content, dict) and content.get("version") == VERSION else None
        if isinstance(plans, dict):
            return plans
        log.warning("%s is damaged or of another version and is not used; plans are found anew", self.path)
        return {}


def key_of(model_class: type) -> FoundKey | None:
    """The key of a class of a ComfyUI's that is imported; None for a class of anything else."""
    file = getattr(sys.modules.get(model_class.__module__), "__file__", None)
    if file is None:
        return None
    root = next((each for each in Path(file).parents if (each / "comfy" / "model_base.py").is_file()), None)
    if root is None:
        return None
    found = hashlib.sha256()
    for each in (*sorted(Path(file).parent.glob("*.py")), root / "comfy" / "ldm" / "modules" / "attention.py"):
        found.update(each.name.encode() + each.read_bytes())
    version = root / "comfyui_version.py"
    said = re.search(r'__version__ = "([^"]*)"', version.read_text(encoding="utf-8")) if version.is_file() else None
    path = f"{model_class.__module__}.{model_class.__qualname__}"
    return FoundKey(model_class=path, source=found.hexdigest()[:16], comfyui=said[1] if said else "")


def found_plan(model_class: type) -> ShardingSpec | None:
    """The plan that this user's `find-plan` has kept for a class; None for none."""
    kept = FoundPlans(FoundPlans.default_path(os.environ, Path.home()))
    try:
        changed = kept.path.stat().st_mtime_ns
    except OSError:
        return None
    return _loaded(model_class, str(kept.path), changed)


@functools.lru_cache(maxsize=KEPT)
def _loaded(model_class: type, path: str, _: int) -> ShardingSpec | None:
    key = key_of(model_class)
    return None if key is None else FoundPlans(Path(path)).load(key)
