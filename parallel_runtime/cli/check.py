"""One finding of the doctor."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """A verdict, what was `seen`, and a remedy where it is no. `needed` checks decide whether anything can run."""

    name: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = True
