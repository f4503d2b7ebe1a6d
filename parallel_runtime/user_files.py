"""Small JSON files in the user's cache folder, `$XDG_CACHE_HOME/parallel-dit`, without that variable `~/.cache/...`.

Owns where they lie and that they are replaced whole: a reader never sees half of one. What is in them is their owners'.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "parallel-dit"


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
