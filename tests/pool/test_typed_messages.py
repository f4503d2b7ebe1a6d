"""Requests and replies as both ends know them: they survive the way, and any other body is refused by name."""

from dataclasses import MISSING, fields
from typing import Any

import pytest

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.wire import replies, requests
from parallel_runtime.wire.channel import Attach
from parallel_runtime.wire.protocol import Message, Op, ProtocolError, decode, encode
from parallel_runtime.wire.records import from_body, to_body
from parallel_runtime.worker.entry import request_of
from pool.messages import CASES, LOAD, REPLIES, SAMPLE, STEP

KINDS = {*requests.KINDS.values(), *replies.OPS, *(kind.reply for kind in requests.KINDS.values())}


def sent(record: object) -> dict:
    """A record's body as it comes out of a message."""
    return decode(encode(Message(Op.DONE, 0, 1, 2, to_body(record)))).body


def name_of(record: object) -> str:
    return type(record).__name__


@pytest.mark.parametrize("record", [*CASES, *REPLIES, Attach(segment=1, num_bytes=4096, drop=(2,))], ids=name_of)
def test_a_record_arrives_as_it_was_sent(record: object) -> None:
    arrived = from_body(type(record), sent(record), "IT")
    assert arrived == record
    assert vars(arrived) == vars(record), "also what was left out of the message as it has its default"


def test_every_kind_of_request_and_reply_is_tried() -> None:
    assert {type(each) for each in (*CASES, *REPLIES)} == KINDS


@pytest.mark.parametrize("record", [*CASES, *REPLIES], ids=name_of)
def test_a_field_more_or_less_is_refused_by_name(record: object) -> None:
    kind, body = type(record), sent(record)
    with pytest.raises(ProtocolError, match="IT: unknown colour; the parent and this rank are of different versions"):
        from_body(kind, {**body, "colour": 1}, "IT")
    for field in fields(kind):
        less = {name: value for name, value in body.items() if name != field.name}
        if field.default is MISSING:
            with pytest.raises(ProtocolError, match=f"IT: missing {field.name}; the parent"):
                from_body(kind, less, "IT")
        else:
            assert getattr(from_body(kind, less, "IT"), field.name) == field.default


MESH = requests.MakeMesh(plan=ParallelPlan(), dropped=(), freed=())


@pytest.mark.parametrize(
    ("request_", "change", "message"),
    [
        (LOAD, {"model": "1"}, "LOAD.model is '1', not of type int"),
        (LOAD, {"model": True}, "LOAD.model is True, not of type int"),
        (LOAD, {"first_rank": 1.5}, "LOAD.first_rank is 1.5, not of type int"),
        (LOAD, {"eviction_order": [1, None]}, r"LOAD.eviction_order\[1\] is None, not of type int"),
        (LOAD, {"layout": {"ranks": 2, "shard": 2}}, "LOAD.layout: unknown shard"),
        (LOAD, {"layout": [2]}, "LOAD.layout is .2., not an object"),
        (LOAD, {"spec": {"path": "/flux.safetensors"}}, "LOAD.spec: missing dtype, mtime_ns, size_bytes"),
        (MESH, {"plan": {"ulysses": "2"}}, "MESH.plan.ulysses is '2', not of type int"),
        (MESH, {"plan": {"weights": 1}}, "MESH.plan.weights is 1, not of type str"),
        (MESH, {"plan": {"stages": 2}}, "MESH.plan: unknown stages; the parent"),
        (MESH, {"plan": {"ulysses": 9}}, "MESH.plan: ulysses=9 is outside 1 to 8; use a degree in that range"),
        (MESH, {"plan": "ulysses=2"}, "MESH.plan is 'ulysses=2', not an object"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(request_: Any, change: dict, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        request_of(request_.op, {**sent(request_), **change})


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("states", 0, 3), "1.0", r"SAMPLE.recurrence.states\[0\].sigma is '1.0', not of type float"),
        (("states", 0, 2), 1, r"SAMPLE.recurrence.states\[0\].given is 1, not of type bool"),
        (("states", 1, 0, 0, 0), 0.5, r"SAMPLE.recurrence.states\[1\].inputs\[0\]\[0\] is 0.5, not of type int"),
        (("states", 1, 0, 0, 1), None, r"SAMPLE.recurrence.states\[1\].inputs\[0\]\[1\] is None, not of type float"),
        (("states", 1), [[], []], r"SAMPLE.recurrence.states\[1\] has 2 values, not 6"),
        (("states", 0, 5), [1.0, 1.0], r"SAMPLE.recurrence.states\[0\].prediction has 2 values, not 5"),
        (("states", 1, 0, 0, 0), 7, "SAMPLE.recurrence: state 1 is made of number 7; use one from 0 to 0"),
        (("step_ends",), [0.0], r"SAMPLE.recurrence.step_ends\[0\] is 0.0, not of type int"),
    ],
)
def test_a_program_is_refused_by_the_name_of_its_field(where: tuple, value: object, message: str) -> None:
    body = sent(SAMPLE)
    *way, last = ("recurrence", *where)
    inner = body
    for step in way:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(ProtocolError, match=message):
        request_of(Op.SAMPLE, body)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (replies.MemoryReply, {"memory": {"resident_bytes": 1.5}}, "IT.memory.resident_bytes is 1.5, not of type int"),
        (replies.MeasureReply, {"name": 1, "free_bytes": 1, "gflops": 1}, "IT.name is 1, not of"),
        (replies.Progress, [1, 2], "IT is .1, 2., not an object"),
        (
            replies.StepReply,
            {"memory": {"resident_bytes": 1}, "ran": {"batch_group": 0}},
            "IT.ran: missing began_s, collectiv",
        ),
        (replies.ProbeReply, {"matmul": [[1.0, 10**400]]}, r"IT.matmul\[0\]\[1\] is 1000.*, not of type float"),
        (replies.ProbeReply, {"matmul": [[1.0]]}, r"IT.matmul\[0\] has 1 values, not 2"),
        (replies.ProbeReply, {"a\nb" * 99: 1}, r"IT: unknown 'a\\nb.*\.\.\..*'; the parent"),
    ],
)
def test_a_reply_that_is_none_is_refused_by_name_in_one_line(kind: type, body: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as refused:
        from_body(kind, body, "IT")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_whole_number_is_a_fraction_too() -> None:
    body = {"name": "x", "free_bytes": 1, "gflops": 3}
    found = from_body(replies.MeasureReply, body, "IT").gflops
    assert (found, type(found)) == (3.0, float)


def test_names_in_a_reply_are_refused_where_their_values_are_not_numbers() -> None:
    body = sent(STEP)
    body["ran"]["regions"]["embed_s"] = "soon"
    with pytest.raises(ProtocolError, match="IT.ran.regions.embed_s is 'soon', not of type float"):
        from_body(replies.StepReply, body, "IT")


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="DONE is no request; a rank answers CHANGE, CHECK, DECODE, LOAD, MEASURE"):
        request_of(Op.DONE, {})
