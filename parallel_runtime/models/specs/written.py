"""A sharding spec as plain data, which a file can hold, and back.

Owns the form: the fields of `ShardingSpec` that are not empty; a tuple is a list. Does not own where files lie.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .spec import ShardingSpec

TEXTS = ("each_call", "unstaged")
TABLES = ("attention", "cut", "gather", "whole", "control", "unless", "hands")


def to_data(spec: ShardingSpec) -> dict[str, Any]:
    """The spec as dictionaries, lists and texts. Raises `ValueError` for one that keeps keys from call to call."""
    if spec.keeps is not None:
        raise ValueError("a plan with keeps is not written to a file; write it by hand")
    found = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in (*TABLES, *TEXTS)}
    return {name: _plain(value) for name, value in found.items() if value}


def from_data(data: object) -> ShardingSpec:
    """The spec that was written. Raises `ValueError` for anything else, with what is wrong."""
    if not isinstance(data, dict) or not all(data.get(name) for name in ("attention", "cut", "gather")):
        raise ValueError("it is no plan: it lacks attention, cut or gather; find it again")
    if unknown := sorted(data.keys() - {*TABLES, *TEXTS}):
        raise ValueError(f"it is no plan of this version: it has {unknown[0]!r}; find it again")
    given: dict[str, Any] = {name: _spoken(data[name]) for name in TABLES if name in data}
    given |= {name: data[name] for name in TEXTS if isinstance(data.get(name), str)}
    try:
        return ShardingSpec(**given)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it is no plan: {error}; find it again") from error


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _spoken(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {str(key): _spoken(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(_spoken(each) for each in value)
    if not isinstance(value, str):
        raise ValueError(f"it is no plan: {value!r} is no text; find it again")
    return value
