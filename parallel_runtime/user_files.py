"""Small JSON files in the user's cache folder, `$XDG_CACHE_HOME/parallel-dit`, without that variable `~/.cache/...`.

Owns where they lie, that they are replaced whole, so a reader never sees half of one, and the form of those that hold
entries by a key. What an entry says is its owner's.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

FOLDER = "parallel-dit"
log = logging.getLogger(__name__)


def user_file(environ: Mapping[str, str], home: Path, name: str) -> Path:
    """A file's place for a user. A relative XDG_CACHE_HOME is not valid and ignored, as its specification says."""
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else home / ".cache") / FOLDER / name


def read_json(path: Path) -> Any:  # noqa: ANN401  any JSON
    """What is in the file; None for one that is damaged. Raises `FileNotFoundError` where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError):
        return None


def replace_json(path: Path, content: object) -> None:
    """Write to a new file, which then takes the old one's place. Raises `OSError` where the folder cannot be written,
    `ValueError` for numbers that JSON does not have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Key:
    """What an entry is kept by: the fields of a class made from this, plain values."""

    @property
    def digest(self) -> str:
        """What the key is found by."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Entries:
    """What one such file holds: `{"version": ..., NAME: {key: entry}}`, the last `most` entries that were put.

    A file that is damaged, or of another version, counts as empty and is replaced by the next `put`. It is warned of
    where `then` says what happens now.
    """

    path: Path
    name: str
    version: int
    most: int | None = None
    then: str = ""

    def all(self) -> dict[str, Any]:
        """Every entry by its key; what an entry is made of is not checked."""
        try:
            content = read_json(self.path)
        except FileNotFoundError:
            return {}
        usable = isinstance(content, dict) and content.get("version") == self.version
        found = content.get(self.name) if usable else None
        if isinstance(found, dict):
            return found
        if self.then:
            log.warning("%s is damaged or of another version and is not believed; %s", self.path, self.then)
        return {}

    def of(self, key: Key) -> dict[str, Any] | None:
        """The entry that was put with this `key` in it; None where there is none, or that of another key."""
        entry = self.all().get(key.digest)
        return entry if isinstance(entry, dict) and entry.get("key") == json.loads(json.dumps(asdict(key))) else None

    def put(self, key: str, entry: Mapping[str, object]) -> None:
        """Keep an entry in the place of the key's last one. Raises as `replace_json`.

        Other processes and threads that put into a file of the folder meanwhile wait, and no entry is lost.
        """
        import fcntl  # here: Windows has none, and nothing to keep

        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a network's file system may have no locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            self._put(key, entry)
        finally:
            os.close(folder)

    def _put(self, key: str, entry: Mapping[str, object]) -> None:
        others = {each: other for each, other in self.all().items() if each != key}
        kept = list({**others, key: entry}.items())
        content = {"version": self.version, self.name: dict(kept[-self.most :] if self.most else kept)}
        try:
            replace_json(self.path, content)
        except ValueError:  # Python reads NaN, which JSON does not have: the file that others are from is damaged
            replace_json(self.path, {**content, self.name: {key: entry}})


Self = TypeVar("Self", bound="Store")


@dataclass(frozen=True)
class Store:
    """The entries of one such file. A class made from this says which, as `Entries` has it, and what an entry is."""

    FILE: ClassVar[str]
    NAME: ClassVar[str]
    VERSION: ClassVar[int]
    MOST: ClassVar[int | None] = None
    THEN: ClassVar[str] = ""

    path: Path

    @classmethod
    def of_user(cls: type[Self]) -> Self:
        """That of the user whose process this is."""
        return cls(user_file(os.environ, Path.home(), cls.FILE))

    @property
    def entries(self) -> Entries:
        """What it holds now."""
        return Entries(self.path, self.NAME, self.VERSION, most=self.MOST, then=self.THEN)

    def keep(self, key: Key, entry: Mapping[str, object]) -> bool:
        """Put an entry, with its key; False where the folder cannot be written, as the log says."""
        try:
            self.entries.put(key.digest, {"key": asdict(key), **entry})
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error  # without the path once more
            log.warning("%s cannot be written (%s), so %s; set XDG_CACHE_HOME", self.path, why, self.THEN)
            return False
        return True
