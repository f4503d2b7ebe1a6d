"""As what ranks send each other attention's heads: as they are, or as fp8, which is asked for by name (`exchange`).

Owns the names, what people are told of them, and bytes. The tensors are parallel/wire_format.py's. Plain Python.
"""

EXACT, FP8 = "exact", "fp8"
EXCHANGES = (EXACT, FP8)
SCALE_BYTES = 1  # of each token and head
# Bytes of memory that a device moves for a number in bf16: to write it as fp8, and to read it as bf16 again.
CODED_BYTES, DECODED_BYTES = 9, 7


def rounding_of(exchange: str) -> str:
    """What the format does to a picture, for people."""
    return f"heads travel as {exchange}, which rounds: not the same picture"


def wire_bytes(head_dim: float, element_bytes: int, exchange: str) -> float:
    """Bytes of a number of a head on its way, given as an element of `element_bytes`."""
    return element_bytes if exchange != FP8 else 1 + SCALE_BYTES / head_dim
