"""Texts without the folders of this machine: what goes to logs, panels and screenshots names files alone.

Owns the search for paths in texts that others wrote, such as an error's. It would rather take a word too many than
leave a folder: a path may have blanks, and texts say where it ends only when it stands in quotes.
"""

import os
import re
from collections.abc import Mapping

NOT_SHM = r"(?!/dev/shm(?![\w.+@-]))"  # the same on every machine, and remedies name it
_START = rf"{NOT_SHM}(?:~|[A-Za-z]:)?"
_QUOTED = re.compile(rf"""(?P<quote>['"`])(?P<path>{_START}[/\\][^'"`\n]*)(?P=quote)""")
# Two slashes may begin a path, but not behind https:
_FIRST = rf"{NOT_SHM}(?:(?:~|[A-Za-z]:|(?<!:)|(?<=file:))[/\\]+|[/\\](?![/\\]))"
_BARE = re.compile(rf"""(?<![\w/.\\~]){_FIRST}(?:[^/\\\n'"`;:,<>|=]*[^/\\\s'"`;:,<>|=][/\\]+)*([\w.+@-]+)""")

_BEGUN = re.compile(rf"""(^|[\s"'=(])(?:~/|[A-Za-z]:\\|{NOT_SHM}/(?=[\w.]))+""")  # a path of nothing but its beginning


def redact_paths(text: str) -> str:
    """`text` with the last part alone of every path in it, and ~ for this user's own folder."""
    return _BEGUN.sub(r"\1", _BARE.sub(r"\1", _QUOTED.sub(_last_part, with_short_home(text))))


def redact_paths_in(value: object) -> object:
    """The same with every text in it redacted: lists and mappings of JSON."""
    if isinstance(value, str):
        return redact_paths(value)
    if isinstance(value, Mapping):
        return {key: redact_paths_in(each) for key, each in value.items()}
    if isinstance(value, list):
        return [redact_paths_in(each) for each in value]
    return value


def with_short_home(text: str) -> str:
    """`text` with ~ for this user's own folder."""
    home = os.path.expanduser("~").rstrip("/\\")
    return re.sub(rf"(?<![\w.]){re.escape(home)}(?![\w.+@-])", "~", text) if home not in ("", "~") else text


def _last_part(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", found["path"]) if part]
    return f"{found['quote']}{parts[-1] if parts else '/'}{found['quote']}"
