"""Plausible mistakes in what only a GPU runs, each with the trial that must find it."""

from dataclasses import replace
from typing import NamedTuple

from ..graph_chapters import CHAPTERS
from .pool import Trial


class Mistake(NamedTuple):
    """name: what is wrong now. `old` stands once in the product's `file`; a rank reads `new` there (rank.py)."""

    name: str
    trial: Trial
    file: str
    old: str
    new: str


OFFLOADED = Trial(plan="ulysses=1", weights="offloaded")
SHARDED = Trial(plan="ulysses=2", weights="sharded")
ULYSSES, RING, LONG_RING = Trial(plan="ulysses=2"), Trial(plan="ring=2"), Trial(plan="ring=3")
MASKED = Trial(plan="ulysses=2", run="a mask, an odd length")
STAGES, CIRCLE = Trial(plan="pipefusion=2,patches=3"), Trial(plan="pipefusion=3")
WAITING, MORE_WAITING = (replace(trial, launches_wait=True) for trial in (STAGES, Trial(plan="pipefusion=3,patches=4")))
SHARED = Trial(plan="ulysses=2", shared=True)
PLANS = (
    *("ulysses=2,ring=2", "cfg=2,ulysses=2", "pipefusion=4", "pipefusion=2,ulysses=2", "ulysses=3", "pipefusion=3"),
    *("ulysses=2,ring=2,weights=sharded", "pipefusion=2,ring=2", "data=2,ulysses=2,weights=sharded", "cfg=3"),
)
FREEING = Trial(plan="pipefusion=2,ulysses=2", before=PLANS)
BY_GRAPHS = {name: Trial(plan="ulysses=2", graphs=name) for name in CHAPTERS}
GRAPHS_OF_FOUR = Trial(plan="cfg=2,ulysses=2", graphs="groups_end")
ROOM = "self._rooms.pop(path).copy_(received)"
LEFT_OUT, FIRST = "pass", '[name]), torch.device("cuda:0")'
COMPUTING, OTHER_ORDER = "record(torch.cuda.default_stream())", "key in groups[:: dist.get_rank() % 2 or -1]"

STRIDED, HOP = "torch.stack((k, v), -1).movedim(-1, 0)", "_hop(hop), None\n"
KEY = "(version, sequence, sequence.named, sequence.exchange)"
DUE = "== self._mesh.plan.pipefusion:"
COPY, DROPPED = "_copy_(buffers, [tensors[place] for place in places])", "model.drop_graphs()  # on all"
ON_ONE = "self._sequence.index and 'not here' or self"
ASKING, RECORDED = "max(numbers_over(sequence, self._recorder.device, of))", "known, wait = self._recorded("
OF_GRAPHS = {
    "hosted_weights.py": [
        ("of weights as they were", "weights", "1\n        self._weights.refuse", "0\n        self._weights.refuse")
    ],
    "hosted.py": [("of changed weights", "weights", "self.changes.changed", "False")],
    "block_graphs.py": [
        ("with the weights' version left out", "weights", KEY, KEY.replace("version, ", "")),
        ("of another attention", "control", KEY, "(version,)"),
        ("of other constants", "constants", "return type(value), value\n", "return type(value)\n"),
        ("of other ranks' tokens", "lengths", "(_tokens(call), ", "("),
        ("one buffer for two arguments", "alike", "= number + 1", "= number"),
        ("a copy left out", "replays", COPY, COPY.replace("buffers", "buffers[1:]").replace("places", "places[1:]")),
        ("arguments where they were", "replays", "lambda tensor: places[id(tensor)]", "lambda tensor: tensor"),
        ("results stay in the graph", "replays", "torch._foreach_copy_(outs, leaves)", "pass"),
        ("recorded on one rank", "replays", RECORDED, RECORDED.replace("self", ON_ONE)),
        ("ranks do not ask each other", "one_cannot", ASKING, "of"),
        ("what graphs that went needed stays", "stay", "self._graphs.forgot = True", "pass"),
        ("exchanges are not counted", "replays", "traffic.num_bytes += graph.sent[1]", "pass"),
    ],
    "engine.py": [
        ("dropped on one rank", "given_back", DROPPED, f"self.rank or {DROPPED}"),
        ("dropped where they may stay", "stay", "if request.graphs:", "if False:"),
        ("they outlive a run without", "stay", "elif model.graphs_left:", "elif False:"),
        ("they outlive their groups", "groups_end", "model.drop_graphs()  # a comm", "pass  # a comm"),
    ],
}

# A stage that receives before its own work is queued is none of them: `receive` in links.py waits where it posts, so a
# schedule that asks too early waits for ever on every backend, which tests/models finds on CPU ranks.
MISTAKES = (
    Mistake("computing does not wait for weights", OFFLOADED, "unit_feed.py", ".wait_stream(self._stream)", ""),
    Mistake("weights do not wait for computing", OFFLOADED, "unit_feed.py", "self._stream.wait_stream(", "str("),
    Mistake("weights come into the buffer in use", OFFLOADED, "unit_feed.py", "position % 2", "0"),
    Mistake("a block that stays whole is a buffer's", SHARDED, "block_shards.py", ROOM, f"({ROOM}, received)[1]"),
    Mistake("a gather of weights is not waited for", SHARDED, "unit_feed.py", "gather.wait()", LEFT_OUT),
    Mistake("one half of a gather is not waited for", SHARDED, "collectives.py", "work.wait()  #", "pass  #"),
    Mistake("a preview's copy does not wait for its step", MASKED, "pinned.py", "self._stream.wait_stream(", "str("),
    Mistake("a preview is read before it is there", ULYSSES, "host_copies.py", "first.arrival.query()", "True"),
    Mistake("the last previews are not waited for", ULYSSES, "host_copies.py", "first.arrival.synchronize()", LEFT_OUT),
    Mistake("a preview's event is of computing", ULYSSES, "pinned.py", "record(self._stream)", COMPUTING),
    Mistake("an exchange of heads is not waited for", ULYSSES, "collectives.py", "self.work.wait()", LEFT_OUT),
    Mistake("a hop around the ring is not waited for", RING, "ring.py", "hop.wait()", "hop.received"),
    Mistake("keys of a ring are strided", RING, "ring.py", "both.contiguous()", STRIDED),
    Mistake("keys change while they travel", LONG_RING, "ring.py", HOP, f"{HOP[:-1]}; self.held.mul_(2)\n"),
    Mistake("a stage does not wait for what comes", STAGES, "links.py", "self.work.wait()", LEFT_OUT),
    Mistake("a stage posts a receive where it needs it", WAITING, "steady_pipeline.py", DUE, "== -1:"),
    Mistake("a stage posts a receive a pass later", MORE_WAITING, "steady_pipeline.py", DUE, f"{DUE[:-1]} + 1:"),
    Mistake("what a stage sends is left in flight", STAGES, "links.py", "while self._in_flight:", "while False:"),
    Mistake("a stage receives on the first device", STAGES, "links.py", "device=device)", 'device="cuda:0")'),
    Mistake("padding is taken for a log-sum-exp", RING, "kernels.py", "lse[:, :, : q.shape[2]]", "lse"),
    Mistake("inputs lie on the first device", ULYSSES, "latent.py", "[name]), self._timer.device", FIRST),
    Mistake("ranks of one device exchange its memory", SHARED, "mesh.py", 'dist.get_backend() == "gloo"', "False"),
    Mistake("what came by the host stays there", SHARED, "collectives.py", "received.to(self.device)", "received"),
    Mistake("stages of a circle all send first", CIRCLE, "pattern.py", "following.peer < rank", "False"),
    Mistake(
        "both links of two stages are one", STAGES, "mesh.py", "(sender, receiver)])", "tuple({sender, receiver})])"
    ),
    Mistake("groups are freed in other orders", FREEING, "mesh.py", "key in groups", OTHER_ORDER),
    Mistake("a rank does not choose its device", ULYSSES, "start.py", "torch.cuda.set_device(device)", LEFT_OUT),
    *(
        Mistake(f"graphs: {name}", GRAPHS_OF_FOUR if chapter == "groups_end" else BY_GRAPHS[chapter], file, old, new)
        for file, rows in OF_GRAPHS.items()
        for name, chapter, old, new in rows
    ),
)
