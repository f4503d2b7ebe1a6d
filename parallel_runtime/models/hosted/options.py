"""ComfyUI's command line in the ranks: which of its options ranks get, as texts, and how a rank applies them.

Owns the list of those that they do not get, each with its reason. Reads the options off ComfyUI's own parser, so a new
one reaches the ranks by itself, and one whose value cannot travel, or that a rank's parser lacks, is left out by name.
Imports nothing of ComfyUI: both sides hand in its parser and its namespace (`comfy.cli_args`).

An option travels as "--name" where its presence says its value, else as "--name=JSON". It is applied by setting the
value, not by parsing: a value that code of a pack has set need not be one that the command line would take.
"""

import argparse
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What ranks do not get. Everything else may change what a module computes.
KEPT: Mapping[str, tuple[str, ...]] = {
    "ranks listen on no address and show nothing": (
        *("--listen", "--port", "--tls-keyfile", "--tls-certfile", "--enable-cors-header", "--max-upload-size"),
        *("--auto-launch", "--disable-auto-launch", "--dont-print-server", "--windows-standalone-build"),
        *("--front-end-version", "--front-end-root", "--enable-compress-response-body", "--comfy-api-base"),
        *("--feature-flag", "--list-feature-flags", "--quick-test-for-ci", "--preview-method", "--preview-size"),
    ),
    "ComfyUI's process finds, reads and writes the files": (
        *("--base-directory", "--extra-model-paths-config", "--output-directory", "--temp-directory"),
        *("--input-directory", "--user-directory", "--models-directory", "--mmap-torch-files", "--disable-mmap"),
        *("--default-hashing-function", "--disable-metadata", "--multi-user", "--database-url"),
        *("--enable-assets", "--disable-assets-autoscan", "--enable-asset-hashing"),
    ),
    "ComfyUI's process runs the nodes and keeps their results": (
        *("--disable-all-custom-nodes", "--whitelist-custom-nodes", "--disable-api-nodes", "--enable-manager"),
        *("--disable-manager-ui", "--enable-manager-legacy-ui"),
        *("--cache-classic", "--cache-lru", "--cache-none", "--cache-ram"),
    ),
    "SP Config says which devices ranks compute on": (
        *("--cuda-device", "--default-device", "--directml", "--oneapi-device-selector", "--cpu", "--cpu-vae"),
    ),
    "the plan says what ranks keep in memory, and how": (
        *("--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram", "--high-ram", "--reserve-vram"),
        *("--vram-headroom", "--disable-nvml-pressure", "--disable-smart-memory", "--disable-dynamic-vram"),
        *("--enable-dynamic-vram", "--fast-disk", "--async-offload", "--disable-async-offload"),
        *("--disable-pinned-memory", "--force-non-blocking", "--cuda-malloc", "--disable-cuda-malloc"),
    ),
    "ranks record no graphs of ComfyUI's compiler, and have no dynamic VRAM": (
        *("--disable-comfy-compiler", "--assert-graph-breaks", "--disable-cuda-graphs"),
    ),
    "the pool keeps what ranks print": ("--verbose", "--log-stdout", "--debug-hang"),
}
# What else ranks have otherwise than ComfyUI, on purpose.
MEANT = (
    "On compute capability 9.0 and 10.0 workers try cuDNN's attention first where ComfyUI tries FlashAttention 2: as "
    "exact, and quicker there (`parallel_runtime/choices.json`). A report names what attended (`ranks[].attention`).",
    "Where attention fails, a worker tries once more without cuDNN's kernel, and keeps to that if it helps; the log "
    "says so.",
)
REASONS: Mapping[str, str] = {name: reason for reason, names in KEPT.items() for name in names}
# What ranks have whatever ComfyUI has. Graphs would hold the addresses of tensors that ranks exchange.
ALWAYS = ("--disable-comfy-compiler", "--disable-cuda-graphs", "--disable-dynamic-vram")


@dataclass(frozen=True)
class Options:
    """Options of a command line whose values are not the defaults: for ranks, as texts, and the others, by name.

    `untold`: those whose value is of a type that cannot travel.
    """

    told: tuple[str, ...]
    kept: tuple[str, ...]
    untold: tuple[str, ...]


def read_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Options:
    """Those of `args`, which `parser` made and code may have changed since."""
    told, kept, untold = [], [], []
    for dest, actions in _by_dest(parser).items():
        value, default = getattr(args, dest, actions[0].default), actions[0].default
        if _same(value, default):
            continue
        names = [name for action in actions for name in action.option_strings]
        if any(name in REASONS for name in names):
            kept.append(names[0])
            continue
        try:
            told.append(_text(actions, value))
        except ValueError:
            untold.append(names[0])
    return Options(tuple(told), tuple(kept), tuple(untold))


def apply_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, options: Iterable[str], *, cpu: bool
) -> tuple[str, ...]:
    """Give `args`, made by a rank's own `parser` of no options, the values of `options`; `cpu`: it computes on one.

    Returns the names of those that the parser does not know, or whose value it has no type for.
    """
    left_out = []
    for option in options:
        name, has_value, text = option.partition("=")
        try:
            action = _action(parser, name)
            setattr(args, action.dest, _restored(json.loads(text), action) if has_value else _presence(action))
        except (LookupError, TypeError, ValueError):
            left_out.append(name)
    for name in (*ALWAYS, *(("--cpu",) if cpu else ())):
        if name in parser._option_string_actions:
            setattr(args, _action(parser, name).dest, True)
    return tuple(left_out)


def _by_dest(parser: argparse.ArgumentParser) -> Mapping[str, Sequence[argparse.Action]]:
    """The options by the name of their value: one that turns off what another turns on has the same."""
    found: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings and action.dest != argparse.SUPPRESS and action.default != argparse.SUPPRESS:
            found.setdefault(action.dest, []).append(action)
    return found


def _same(value: object, default: object) -> bool:
    """Whether a value says what the default says. ComfyUI makes an empty set where nothing was given."""
    return (value == set() and not default) or (type(value) is type(default) and value == default)


def _text(actions: Sequence[argparse.Action], value: object) -> str:
    """Raises ValueError for a value of a type that cannot travel."""
    for action in actions:
        if action.nargs == 0 and action.const is not None and _same(value, action.const):
            return action.option_strings[0]
    return f"{actions[0].option_strings[0]}={json.dumps(_plain(value), sort_keys=True)}"


def _plain(value: object) -> Any:  # noqa: ANN401  what JSON can carry
    """The value as JSON, where an object of one key says the type of what has none there."""
    if isinstance(value, enum.Enum):
        return {"enum": _plain(value.value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((_plain(each) for each in value), key=json.dumps)}
    raise ValueError(f"a value of type {type(value).__name__} cannot travel")


def _restored(value: Any, action: argparse.Action) -> Any:  # noqa: ANN401  JSON's value; an option's
    """The inverse of `_plain`. Raises ValueError for a member that the option's own type lacks."""
    if isinstance(value, list):
        return [_restored(each, action) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "enum":
        return _enum_of(action)(inner)
    items = _restored(inner, action)
    return {"tuple": tuple, "set": set}[kind](items)


def _enum_of(action: argparse.Action) -> type[enum.Enum]:
    """The type of an option's members. ComfyUI's action for such options keeps it under a name of its own."""
    for each in vars(action).values():
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return each
    raise ValueError(f"{action.option_strings[0]} has no members here")


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action:
    """Raises KeyError for an option that the parser does not know."""
    return parser._option_string_actions[name]


def _presence(action: argparse.Action) -> Any:  # noqa: ANN401  an option's value
    """What an option's presence alone says. Raises ValueError for one that needs a value."""
    if action.nargs != 0 or action.const is None:
        raise ValueError(f"{action.option_strings[0]} needs a value")
    return action.const
