"""NCCL's configuration files: what they set, and what of it no rank may have.

NCCL reads them in every rank and takes what the rank's environment does not say (NCCL user guide, Environment
Variables; `setEnvFile` in its sources). So what environment.py sets is safe from them, and what it only leaves out is
not. Owns the reading and the refusal. Files are named by what people know them as, never by a path in a home folder.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .environment import LISTEN_HERE, NEVER_PASSED_ON

# Of these an empty value means something too, so nothing that we could set keeps a file's away.
REFUSED = tuple(name for name in NEVER_PASSED_ON if name not in LISTEN_HERE)
LIBRARIES = ("nccl", "rccl")
REMEDY = "take that line out of the file; ranks find each other without it"


@dataclass(frozen=True, kw_only=True)
class NcclFile:
    """A configuration file that is there, and the variables that it sets."""

    name: str
    settings: tuple[str, ...]

    @property
    def refused(self) -> list[str]:
        """The settings that would have ranks meet elsewhere than here."""
        return [name for name in self.settings if name in REFUSED]

    @property
    def without_effect(self) -> list[str]:
        """The settings that every rank's environment has otherwise."""
        return [name for name in self.settings if name in LISTEN_HERE]


def present_files() -> list[NcclFile]:
    """Those of this process's environment, user and machine."""
    return nccl_files(os.environ)


def nccl_files(
    environment: Mapping[str, str], *, home: Path | None = None, system: Path = Path("/etc")
) -> list[NcclFile]:
    """The files that ranks of this user may read, in the order in which NCCL takes them.

    NCCL before 2.23 reads the one of the home folder even where NCCL_CONF_FILE names another. RCCL has its own names.
    """
    home = _home() if home is None else home
    places = [("NCCL_CONF_FILE", Path(environment["NCCL_CONF_FILE"]))] if environment.get("NCCL_CONF_FILE") else []
    if home is not None:
        places += [(f"~/.{library}.conf", home / f".{library}.conf") for library in LIBRARIES]
    places += [(f"/etc/{library}.conf", system / f"{library}.conf") for library in LIBRARIES]
    found = []
    for name, path in places:
        with suppress(OSError):  # as NCCL goes on without what it cannot open
            found.append(NcclFile(name=name, settings=_settings(path.read_text(encoding="utf-8", errors="replace"))))
    return found


def refusal(files: Sequence[NcclFile], *, meet: str = "on this machine") -> str | None:
    """Why ranks, which are to meet there, may not start with these files, None where they may."""
    said = [f"{file.name} sets {', '.join(file.refused)}" for file in files if file.refused]
    return f"{'; '.join(said)}, with which NCCL would meet ranks elsewhere than {meet}" if said else None


def _home() -> Path | None:
    """This user's folder as the system has it, whatever HOME says; None for one whom it does not know, on Windows."""
    try:
        import pwd  # here: Windows has none, and must still be told what is missing

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return None


def _settings(text: str) -> tuple[str, ...]:
    """The variable of each line, as NCCL finds it: what stands before the first =, but in lines that begin with #."""
    lines = (line.partition("=") for line in text.split("\n") if not line.startswith("#"))
    return tuple(dict.fromkeys(name for name, sign, _ in lines if sign and name))
