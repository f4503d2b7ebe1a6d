"""What a person sees of a command while it runs, and colours: on stderr what goes on, on a terminal alone what moves.

Owns when something may move or be coloured. NO_COLOR (no-color.org) and TERM=dumb switch colours off.
"""

import errno
import os
from collections.abc import Callable, Mapping
from typing import TextIO, TypeAlias

BAR = 24  # characters
CLEAR = "\r\x1b[K"
CODES = {"good": "32", "bad": "31", "note": "33", "strong": "1", "dim": "2"}

Paint: TypeAlias = Callable[[str, str], str]


class PhaseLine:
    """Tells phases and counts on a stream; None: nothing is written.

    On a terminal one line is written over and over, with a bar for what is counted. Elsewhere each phase is a line, and
    counts are left out.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._moves = stream is not None and is_terminal(stream)
        self._phase = ""

    def phase(self, text: str) -> None:
        """What begins now."""
        self._phase = text
        if self._stream is not None:
            self._write(f"{CLEAR}{text} ..." if self._moves else f"{text} ...\n")

    def count(self, done: float, of: float, what: str = "") -> None:
        """How much of the present phase is done, of how much."""
        if self._moves and of > 0:
            share = min(1.0, done / of)
            bar = ("#" * round(BAR * share)).ljust(BAR, "-")
            self._write(f"{CLEAR}{self._phase} [{bar}] {share:.0%}{what and f' {what}'}")

    def end(self) -> None:
        """Leave a terminal's line as it was before."""
        if self._moves:
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        write(self._stream, text)


SILENT = PhaseLine()


def write(stream: TextIO | None, text: str) -> None:
    """Nothing where the stream is closed: by its owner, by who read it, or with its terminal.

    Letters that its encoding does not have are written as `\\u5de5`.
    """
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or what is left would raise again at exit


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees this stream while it is written; None is one that was closed."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def plain(text: str, _: str) -> str:
    """No colours."""
    return text


def paint_for(stream: TextIO | None, environ: Mapping[str, str]) -> Paint:
    """`paint(text, name)` with the colours of `CODES` where the stream is a terminal, else the text as it is."""
    if environ.get("NO_COLOR") or not is_terminal(stream):
        return plain
    return lambda text, name: f"\x1b[{CODES[name]}m{text}\x1b[0m"
