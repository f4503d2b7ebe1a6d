"""Mistakes that no test can tell from the code as it is: the operator and the mistaken line, and the reason."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str], str] = {}
