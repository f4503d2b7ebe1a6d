"""How many bytes the tensors take that an object holds."""

from torch import Tensor


def bytes_in(value: object) -> int:
    """Bytes of all tensors in an object: in its attributes, in lists, tuples and dicts, each storage once."""
    return sum(_storages(value, {}).values())


def _storages(value: object, met: dict[int, int]) -> dict[int, int]:
    if id(value) in met:
        return met
    if isinstance(value, Tensor) and type(value) is Tensor:
        storage = value.untyped_storage()
        met[id(value)], met[storage._cdata] = 0, storage.nbytes()
        return met
    met[id(value)] = 0
    inside = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    for each in (*inside, *vars(value).values()) if hasattr(value, "__dict__") else inside:
        _storages(each, met)
    return met
