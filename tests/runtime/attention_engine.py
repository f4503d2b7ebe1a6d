"""An engine whose steps are attention calls over uneven heads and tokens, in real ranks with real process groups.

A step's options describe the call; each rank makes the whole of it from a seed, attends with its part, and notes how
far it is from its rows of the whole, and whether heads in chunks give the same bits. Owns what runs in the ranks;
`test_attention.py` says what must be found.
"""

from functools import partial

import torch
import torch.nn.functional as F
from noted import note

from parallel_runtime.proof import relative_error
from parallel_runtime.wire.protocol import Op
from parallel_runtime.wire.replies import EmptyReply, LoadReply, Memory, StepReply
from parallel_runtime.worker.mesh import Groups, Mesh

CPU = torch.device("cpu")
NO_MEMORY = Memory(resident_bytes=0)


class AttentionEngine:
    """Answers LOAD and MESH so far as the pool needs it; a step is one call of attention."""

    def __init__(self, *, rank, device, segments):
        self.rank = rank
        self.meshes, self.groups = {}, Groups()

    def handle(self, message, *, progress, cancelled, beat):
        if message.op is Op.LOAD:
            return LoadReply(dtype="float32", memory=NO_MEMORY)
        if message.op is Op.MESH:
            plan = message.body.plan
            self.meshes[message.body.mesh] = Mesh(
                plan, device=CPU, groups=self.groups, show_waiting=lambda _: None, overlap=message.body.overlap
            )
            return EmptyReply()
        mesh = self.meshes[message.body.mesh]
        options = dict(message.body.calls[0])
        notes = {"notes": options.pop("notes")}
        if mesh.member:
            note(notes, self.rank, attended(mesh, **options))
        return StepReply(ran=None, memory=NO_MEMORY)


def forced(number, shared):
    """So many chunks, whether or not they pay."""
    return number


def attended(mesh, *, heads, groups, queries, keys, common, width, values, mask, boolean, scale, exchange):
    """Relative error of this rank's rows, and what was sent. `queries` and `keys` are the tokens of every part, behind
    `common` keys that every rank has."""
    sequence = mesh.attention
    generator = torch.Generator().manual_seed(heads * 100 + groups)
    all_queries, all_keys = sum(queries), common + sum(keys)
    q, k, v = (
        torch.randn(2, count, tokens, size, generator=generator)
        for count, tokens, size in ((heads, all_queries, width), (groups, all_keys, width), (groups, all_keys, values))
    )
    added = None
    if mask:
        added = torch.randn(*mask, generator=generator) * 2
        added = added > -1 if boolean else added
        if boolean:
            added[..., 0] = True  # no query without a key
    calls, chunked = [], []

    def kernel(qkv, heads, mask):
        q, k, v = qkv
        calls.append((heads, q.shape[2], k.shape[2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    want = kernel([q, k, v], heads, added)
    calls.clear()
    mine = [slice(sum(all_[: sequence.index]), sum(all_[: sequence.index + 1])) for all_ in (queries, keys)]
    own_keys = [*range(common), *range(common + mine[1].start, common + mine[1].stop)]
    mesh.traffic.reset()
    parts = (q[:, :, mine[0]], k[:, :, own_keys], v[:, :, own_keys])
    if exchange:
        given = {"query_lengths": queries, "key_lengths": keys, "mask": added, "scale": scale, "common": common}
        got = sequence.attend(kernel, list(parts), **given)
        first_calls, sent, chosen = list(calls), mesh.traffic.num_bytes, sequence.chunks
        for number in (2, 3):
            calls.clear()
            mesh.traffic.reset()
            sequence.chunks = partial(forced, number)
            again = sequence.attend(kernel, list(parts), **given)
            chunked.append((len(calls), bool(torch.equal(again, got)), mesh.traffic.num_bytes == sent))
        sequence.chunks, calls[:] = chosen, first_calls
    else:
        got = F.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=heads != groups)
    want = want[:, :, mine[0]]
    assert got.shape == want.shape, (got.shape, want.shape)
    num_bytes = mesh.traffic.num_bytes
    gathered = sequence.gather(parts[1][:, :, common:], dim=2, lengths=keys)
    return {
        "error": relative_error(got, want) if want.numel() else 0.0,
        "gathered": bool(torch.equal(gathered, k[:, :, common:])),
        "heads": [call[0] for call in calls],
        "chunked": chunked,
        "bytes": num_bytes,
    }
