"""All cases of shared models, from the files that hold them (cases_*.py)."""

from importlib import import_module
from pathlib import Path

from .tiny import CASES

__all__ = ["CASES"]

for file in sorted(Path(__file__).parent.glob("cases_*.py")):
    import_module(f"{__package__}.{file.stem}")
