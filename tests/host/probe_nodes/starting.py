"""Has a test host fork its ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

path = Path(__file__).resolve().parents[1] / "forked_ranks.py"
spec = importlib.util.spec_from_file_location("forked_ranks", path)
forked_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forked_ranks)
forked_ranks.fork_ranks()
