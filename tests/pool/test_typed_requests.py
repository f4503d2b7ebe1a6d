"""Requests as both ends know them: they survive the way, and a body that is not one of them is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import Layout, ParallelPlan
from parallel_runtime.program import Program, State
from parallel_runtime.wire import requests
from parallel_runtime.wire.protocol import Message, Op, ProtocolError, decode, encode

PROGRAM = Program(
    states=(State(given=True, sigma=1.0, timestep=0.5), State(inputs=((0, 0.25),), denoised=((0, 0.75),))),
    step_ends=(0,),
)
SPEC = ModelSpec("/models/flux.safetensors", "bfloat16", "flux", 7, 8)
LOAD = requests.Load(
    model=1, spec=SPEC, layout=Layout(ranks=2, shards=2), first_rank=0, mesh=None, budget_bytes=9, eviction_order=(3, 2)
)
CASES = [
    LOAD,
    requests.Unload(model=1),
    requests.ChangeWeights(model=1, records=({"key": "a"},), side_branch=True, first=True, last=False),
    requests.SetStrengths(model=1, strengths=(0.5, -1.0)),
    requests.MakeMesh(mesh=4, plan=ParallelPlan(ulysses=2, cfg=2)),
    requests.Step(
        model=1,
        mesh=4,
        calls=({"timed": False}, {}),
        lanes=(((0, 0, 1),), ((1, 0, 2), (1, 2, 3))),
        repeated={"0.txt": 5},
        pipeline=(requests.CachedKeys(epoch=1, slot=None, warm=True),),
    ),
    requests.Sample(
        model=1,
        mesh=4,
        program=PROGRAM,
        cfg=2.5,
        lanes=(requests.GroupWork(start=0, stop=1, conds=(0, 1), exchange=True),),
        calls=({},),
        modulation_bytes=1,
        timeline=False,
    ),
    requests.CheckCopies(mesh=4),
    requests.MeasureDevice(),
    requests.Probe(mesh=4),
    requests.Trim(ranks=(0, 1)),
]


def body_of(request: requests.AnyRequest) -> dict:
    """A body as it comes out of a message."""
    return json.loads(json.dumps(requests.to_body(request)))


@pytest.mark.parametrize("request_", CASES, ids=lambda each: type(each).__name__)
def test_a_request_arrives_as_it_was_sent(request_: requests.AnyRequest) -> None:
    op = requests.OPS[type(request_)]
    message = decode(encode(Message(op, 0, 1, 2, requests.to_body(request_))))
    assert requests.from_body(message.op, message.body) == request_


def test_every_kind_of_request_is_tried() -> None:
    assert {type(each) for each in CASES} == set(requests.OPS)


@pytest.mark.parametrize("request_", CASES, ids=lambda each: type(each).__name__)
def test_a_field_more_or_less_is_refused_by_name(request_: requests.AnyRequest) -> None:
    op = requests.OPS[type(request_)]
    with pytest.raises(ProtocolError, match=f"{op.name}: unknown colour; the parent and this rank are of different"):
        requests.from_body(op, body_of(request_) | {"colour": 1})
    for field in fields(request_):
        body = body_of(request_)
        del body[field.name]
        with pytest.raises(ProtocolError, match=f"{op.name}: missing {field.name}"):
            requests.from_body(op, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "1"}, "LOAD.model is '1', not of type int"),
        ({"model": True}, "LOAD.model is True, not of type int"),
        ({"mesh": 1.5}, "LOAD.mesh is 1.5, not of type int"),
        ({"eviction_order": [1, None]}, r"LOAD.eviction_order\[1\] is None, not of type int"),
        ({"layout": {"ranks": 2, "shard": 2}}, "LOAD.layout: unknown shard"),
        ({"layout": [2]}, "LOAD.layout is .2., not an object"),
        ({"spec": {"path": "/models/flux.safetensors"}}, "LOAD.spec: missing adapter, dtype, mtime_ns, size_bytes"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        requests.from_body(Op.LOAD, body_of(LOAD) | change)


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="DONE is no request; a rank answers CHECK, LOAD, MEASURE"):
        requests.from_body(Op.DONE, {})
