"""The files of a working tree by what they are: where a mutant's text stands, and which pytest node a test is.

Owns the search. Reads files; writes none.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

from .mutant import Mutant

PRODUCT = re.compile(r"(?:parallel_runtime|nodes|web)/.*\.(?:py|m?js)|__init__\.py")
TESTS = re.compile(r"tests/(?:.*/)?test_\w+\.py")


class NotApplicableError(ValueError):
    """A mutant whose text, or whose test, is not found exactly once: mend the table."""


class Tree:
    """The working tree at `root`: files that git tracks, and new ones that it does not ignore."""

    def __init__(self, root: Path) -> None:
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        self.root = root
        self.files = tuple(sorted(name for name in listed.split("\0") if name and (root / name).is_file()))
        self._products = self._read(PRODUCT)
        self._tests = self._read(TESTS)

    def place(self, mutant: Mutant) -> str:
        """The file in which `mutant.old` stands, exactly once. Raises `NotApplicableError`."""
        counts = {
            path: text.count(mutant.old)
            for path, text in self._products.items()
            if mutant.file in (None, PurePosixPath(path).name)
        }
        found = [path for path, count in counts.items() for _ in range(count)]
        if len(found) != 1 or mutant.old == mutant.new:
            where = f"{len(found)} times ({', '.join(found)})" if found else "nowhere"
            raise NotApplicableError(f"{mutant.name}: its old text stands {where} in {mutant.file or 'the product'}")
        return found[0]

    def node(self, test: str) -> str:
        """The pytest node of `test_file.py::test_name[parameters]`, wherever that function is now.

        The file's name decides between functions of one name. Raises `NotApplicableError`.
        """
        file, _, name = test.partition("::")
        defined = re.compile(rf"^def {re.escape(name.partition('[')[0])}\(", re.MULTILINE)
        found = [path for path, text in self._tests.items() if defined.search(text)]
        named = [path for path in found if PurePosixPath(path).name == file]
        if len(named or found) != 1:
            raise NotApplicableError(f"{test} is defined by {named or found or 'no file'}; name one test")
        return f"{(named or found)[0]}::{name}"

    def _read(self, which: re.Pattern[str]) -> dict[str, str]:
        return {name: (self.root / name).read_text(encoding="utf-8") for name in self.files if which.fullmatch(name)}
