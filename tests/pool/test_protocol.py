"""The wire's layout: what goes in comes out, and no bytes whatever do more than raise ProtocolError."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.plan import MAX_RANKS
from parallel_runtime.wire.protocol import (
    ALIGNMENT,
    DTYPE_BYTES,
    ENTRY,
    HEADER,
    MAX_MESSAGE_BYTES,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    Message,
    Op,
    ProtocolError,
    TensorSpec,
    decode,
    encode,
)

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.", min_size=1, max_size=24)
specs = st.builds(
    TensorSpec,
    name=names,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=st.lists(st.integers(0, 64), max_size=6).map(tuple),
    segment=st.integers(0, 65535),
    offset=st.integers(0, 1 << 20).map(lambda cells: cells * ALIGNMENT),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.builds(
    Message,
    op=st.sampled_from(Op),
    rank=st.integers(0, MAX_RANKS - 1),
    generation=st.integers(0, 2**32 - 1),
    request=st.integers(0, 2**64 - 1),
    body=st.dictionaries(st.text(), json_values, max_size=4),
    tensors=st.lists(specs, max_size=4, unique_by=lambda spec: spec.name).map(tuple),
)
SPEC = TensorSpec("x", "float32", (2, 3), 1, 128)
STEP = Message(Op.STEP, 1, 2, 3, {"a": 1}, (SPEC,))


def patched(offset: int, layout: str, value: object) -> bytes:
    """The bytes of STEP with one field overwritten."""
    data = bytearray(encode(STEP))
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


def with_text(text: bytes) -> bytes:
    return HEADER.pack(b"PDiT", 1, Op.DONE, 0, 0, len(text), 0, 0) + text


@given(messages)
def test_a_message_comes_back_as_it_was_sent(message):
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_every_truncation_and_every_trailing_byte_is_refused(message, data):
    whole = encode(message)
    with pytest.raises(ProtocolError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProtocolError):
        decode(whole + data.draw(st.binary(min_size=1, max_size=8)))
    with pytest.raises(ProtocolError):
        decode(whole + whole)
    with pytest.raises(ProtocolError):
        decode(whole + b" ")  # which JSON alone would let pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (patched(0, "<4s", b"PDiU"), "magic"),
        (patched(5, "<B", 0), "op 0 is unknown"),
        (patched(5, "<B", max(Op) + 1), "op .* is unknown"),
        (patched(6, "<H", MAX_RANKS), f"rank {MAX_RANKS}"),
        (patched(12, "<I", 0xFFFFFFFF), "bytes of text"),
        (patched(24, "<I", 0), "for 0 tensors"),
        (patched(24, "<I", 0xFFFFFFFF), "4294967295 tensors"),
        (patched(28, "<24s", b""), "tensor name ''"),
        (patched(28, "<24s", b"x\0y"), "tensor name"),
        (patched(28, "<24s", b"X"), "tensor name 'X'"),
        (patched(28, "<24s", b"\xff"), "not ASCII"),
        (patched(52, "<Q", 2**63), "passes the end"),
        (patched(52, "<Q", 129), "multiple of 64"),
        (patched(60, "<B", 0), "dtype code 0"),
        (patched(60, "<B", 200), "dtype code 200"),
        (patched(61, "<B", 7), "7 dims"),
        (patched(61, "<B", 1), "1 dims of"),
        (patched(64, "<I", 0xFFFFFFFF), None),
        (with_text(b""), "not JSON"),
        (with_text(b"[]"), "JSON list"),
        (with_text(b"{} {}"), "not JSON"),
        (with_text(b'{"a":NaN}'), "NaN"),
        (with_text(b'{"a":-Infinity}'), "-Infinity"),
        (with_text(b'{"a":1e999}'), "1e999"),
        (with_text(b'{"a":"\xff"}'), "not JSON"),
        (with_text(b'{"a":' + b"[" * 50_000), "not JSON"),
        (with_text(b'{"a":' + b"1" * 50_000 + b"}"), "not JSON"),
    ],
)
def test_each_field_is_checked(data, reason):
    if reason is None:
        assert decode(data).tensors[0].num_bytes == 0xFFFFFFFF * 3 * 4  # sound in itself; its segment refuses it
        return
    with pytest.raises(ProtocolError, match=reason):
        decode(data)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_message_in_another_version_of_the_layout_is_refused_whatever_it_says(version):
    with pytest.raises(ProtocolError, match=f"magic b'PDiT' version {version}, expected b'PDiT' version 1"):
        decode(patched(4, "<B", version))


def test_a_shape_whose_product_overflows_is_refused_even_when_it_is_empty():
    dims = (0, *[0xFFFFFFFF] * 5)
    entry = ENTRY.pack(b"x", 0, 1, 6, 0, *dims)
    data = HEADER.pack(b"PDiT", 1, Op.STEP, 0, 0, 2, 0, 1) + entry + b"{}"
    with pytest.raises(ProtocolError, match="passes the end"):
        decode(data)


def test_names_that_repeat_are_refused_on_both_sides():
    with pytest.raises(ProtocolError, match="repeat"):
        encode(Message(Op.STEP, 0, 0, 0, {}, (SPEC, SPEC)))
    once = encode(STEP)
    entry = once[HEADER.size : HEADER.size + ENTRY.size]
    twice = HEADER.pack(b"PDiT", 1, Op.STEP, 0, 0, 2, 0, 2) + entry + entry + b"{}"
    with pytest.raises(ProtocolError, match="repeat"):
        decode(twice)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": ""}, "name ''"),
        ({"name": "a" * 25}, "1 to 24"),
        ({"name": "é"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"dtype": "complex64"}, "complex64"),
        ({"shape": (1,) * 7}, "7 dims"),
        ({"shape": (-1,)}, "outside"),
        ({"segment": 65536}, "65536"),
        ({"offset": 8}, "multiple of 64"),
        ({"offset": -64}, "passes the end of any segment, 1099511627776 bytes"),
    ],
)
def test_a_tensor_spec_checks_what_it_is_given(change, reason):
    with pytest.raises(ProtocolError, match=reason):
        TensorSpec(**{"name": "x", "dtype": "int8", "shape": (1,), "segment": 0, "offset": 0, **change})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"a": float("nan")}, "STEP: the body cannot be written as JSON: Out of range float"),
        ({"a": float("inf")}, "STEP: the body cannot be written as JSON: Out of range float"),
        ({"a": object()}, "STEP: the body cannot be written as JSON: .*object"),
        ({"a": "x" * MAX_TEXT_BYTES}, f"STEP: a body of {MAX_TEXT_BYTES + 8} bytes, at most {MAX_TEXT_BYTES}; shorten"),
        ([1], "STEP: the body is a list, not a dict"),
    ],
)
def test_a_body_that_cannot_travel_is_refused_before_it_is_sent(body, said):
    with pytest.raises(ProtocolError, match=said):
        encode(Message(Op.STEP, 0, 0, 0, body))


@pytest.mark.parametrize("field", ["rank", "generation", "request"])
def test_a_number_that_does_not_fit_its_field_is_refused(field):
    numbers = {"rank": 0, "generation": 0, "request": 0, field: 2**64}
    with pytest.raises(ProtocolError, match=f"rank {2**64} outside" if field == "rank" else f"{field} {2**64}"):
        encode(Message(Op.STEP, **numbers))


def test_the_largest_message_has_the_size_that_receivers_reserve():
    specs = tuple(TensorSpec(f"t{index}", "int8", (1,), 0, 0) for index in range(MAX_TENSORS))
    body = {"a": "x" * (MAX_TEXT_BYTES - len('{"a":""}'))}
    assert len(encode(Message(Op.STEP, 0, 0, 0, body, specs))) == MAX_MESSAGE_BYTES
    with pytest.raises(ProtocolError, match="1025 tensors"):
        encode(Message(Op.STEP, 0, 0, 0, {}, (*specs, SPEC)))


def test_text_that_no_encoding_can_write_travels_all_the_same():
    text = "\udcff not UTF-8, \N{GRINNING FACE}"
    assert decode(encode(Message(Op.ERROR, 0, 0, 0, {"text": text}))).body == {"text": text}
    assert json.loads(encode(Message(Op.ERROR, 0, 0, 0, {"text": text}))[HEADER.size :].decode("ascii"))
