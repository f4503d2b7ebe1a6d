"""Reports and logs hold no prompt, no user's name and no folder; an error may name the file that it is about."""

import getpass
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.soak_models import lora, write_model
from host import workflows
from host.client import ComfyClient
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.tiny_hosted import call
from host.tiny_models import TinyModels
from parallel_runtime.devices import Device
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.redact_paths import redact_paths, with_short_home
from parallel_runtime.report.schema import REPORT
from parallel_runtime.wire.records import to_body

PROMPT = "a xylophonist nobody may hear of"
PATH = re.compile(r"(^|[\s\"'(=])(/|~/|[A-Za-z]:\\)[\w.-]+/")


def texts(value: Any) -> Iterator[str]:
    """Every string in plain values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts(each)


def private(text: str) -> bool:
    """Whether a text says what is nobody's business."""
    return bool(PATH.search(text)) or text == getpass.getuser() or "xylophonist" in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("rank 0: ValueError: /home/John Doe/models/x.safetensors was changed; again", "x.safetensors was changed; "),
        ("[Errno 2] No such file: '/media/My Disk/a (1)/c d.safetensors'", "No such file: 'c d.safetensors'"),
        ("~/me/x, C:\\Users\\John Doe\\x.st and /me/b=/me/c", "x, x.st and b=c"),
        (
            "2 s/step of cpu:0/cuda:1, see https://example.org/a/b",
            "2 s/step of cpu:0/cuda:1, see https://example.org/a/b",
        ),
        ("models/diffusion_models/x does not exist", "models/diffusion_models/x does not exist"),
        ("cannot open /home//John Doe//x.safetensors now", "cannot open x.safetensors now"),
        ("cannot open //nas/John Doe/x.safetensors now", "cannot open x.safetensors now"),
        (r"\\nas\me\x.safetensors, C:\\Users\\me\\y", "x.safetensors, y"),
        ("see file:///home/me/x, https://example.org/a/b and a // b", "see file:x, https://example.org/a/b and a // b"),
    ],
)
def test_of_a_path_only_the_files_name_is_left(text: str, left: str) -> None:
    assert left in redact_paths(text)
    assert not private(redact_paths(text))
    assert "John" not in redact_paths(text)


@given(
    st.lists(st.sampled_from(["/", "\\", "~", "C:", " ", "'", '"', "(", "=", ":", "me", "a.st", "/a b/c"]), max_size=9)
)
def test_a_report_may_hold_whatever_is_left(pieces: list[str]) -> None:
    left = redact_paths("said: " + "".join(pieces))
    assert "path" not in REPORT["loop"].fields["reason"].check(left)


def test_a_remedy_keeps_the_folder_that_is_the_same_on_every_machine() -> None:
    remedy = "no /dev/shm: chmod 1777 /dev/shm, rm /dev/shm/nccl-a1 '/dev/shm/nccl-b 2'"
    assert redact_paths(remedy) == remedy
    assert REPORT["loop"].fields["reason"].check(remedy) == ""
    assert redact_paths("in /dev/shm2/me/x, /home/dev/shm") == "in x, shm"


def test_this_users_own_folder_is_left_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert redact_paths("no space in /home/somebody") == "no space in ~"
    assert with_short_home("kept in /home/somebody/.cache/x, not /home/somebodyelse") == (
        "kept in ~/.cache/x, not /home/somebodyelse"
    )


def test_reports_and_the_servers_log_of_a_real_run_hold_nothing_private(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    """The log is ComfyUI's, which writes folders of its own when it starts."""
    before = len(comfy_server.log)
    client.queue({"end": {"class_type": "ReleaseParallelPool", "inputs": {}}}).require_success()
    graph = workflows.text_to_image(tiny_models, seed=103, steps=2, width=64, height=64, prompt=PROMPT)
    graph = parallel(graph, sampler="ParallelFluxSampler")
    graph["decode"]["class_type"] = "TimedVAEDecode"
    result = client.queue(graph).require_success()
    reports = [report for node in ("sampler", "decode") for report in result.outputs[node]["parallel_dit"]]
    assert len(reports) == 2
    said = [*texts(reports), *(text for _, text in result.texts)]
    assert tiny_models.dev in said, "no report of the model, so this shows nothing"
    assert [text for text in said if private(text)] == []
    log = comfy_server.log[before:]
    assert f"loading {tiny_models.dev} into the workers" in log, "the log is elsewhere, so this shows nothing"
    assert "xylophonist" not in comfy_server.log
    assert str(tiny_models.models) not in log


def test_what_ranks_print_and_what_the_pool_tells_holds_nothing_private(tmp_path) -> None:
    spec = write_model(tmp_path / "model.safetensors", seed=1)
    with Pool((Device("cpu", 0), Device("cpu", 1)), threads_per_rank=1) as pool:
        done = pool.run(spec, ParallelPlan(ulysses=2), [call()], deltas=lora("one", seed=1, strength=0.5))
        told = [*texts(pool.status()), *texts([to_body(ran) for ran in done.ran])]
        printed = [rank.output.text() for rank in pool._workers.generation.ranks]
    assert "model.safetensors" in told
    assert [text for text in told if private(text)] == []
    assert [text for text in printed if private(text)] == []
