"""Plans are tried before a run of many steps, in a real server: what is said, what is kept, and that a seed stays one.

Owns: the tries of a whole graph, whose two CPU ranks the planner takes for GPUs that it knows. Does not own the rules
(planner/test_tries.py).
"""

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from comfy.test_auto_each_run import measured, report_of, stock_graph
from rounding import ROUNDING

from host.client import ComfyClient, PromptResult
from host.pack_workflows import latent_of, relative_error, saved_latent
from host.server import servers_cache
from host.tiny_models import TinyModels

PLAN = "(?:ring 2|ulysses 2|one device)"
LINE = re.compile(rf"tried {PLAN}: [0-9.]+x(, {PLAN}: [0-9.]+x)?, kept (?P<kept>{PLAN})(?P<later> from .* on)?")

KEPT = servers_cache() / "parallel-dit" / "plans.json"


def runs(plan: dict[str, Any], kept: str) -> bool:
    """Whether a report's plan is the one of those words."""
    return all(plan["degrees"][axis] == (2 if kept == f"{axis} 2" else 1) for axis in ("ring", "ulysses"))


def test_a_first_run_tries_plans_and_the_kept_one_computes_all_of_it_and_the_next(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    KEPT.unlink(missing_ok=True)  # of earlier sessions
    graph = stock_graph(tiny_models, seed=520, steps=20, width=64, height=80)
    asked = measured(graph, tries="auto")
    asked["known"]["inputs"]["latency_s"] = 0.001  # so that plans of two ranks are predicted to be near
    again = measured(graph, loop="host", tries="auto")
    again["known"]["inputs"]["latency_s"] = 0.001
    again["sampler"]["inputs"]["steps"] = 3  # too few to try anything, also where the run before was slow meanwhile
    # The second waits in the queue while the first runs: else what that left might be tried between them.
    queued: list[Future[PromptResult]] = []
    with ThreadPoolExecutor(1) as beside:
        first = client.queue(asked, on_event=lambda _: queued or queued.append(beside.submit(client.queue, again)))
        second = queued[0].result()
    told = [text for node, text in first.texts if node == "sampler"]
    lines = [line for text in told for line in text.splitlines() if line.startswith("tried ")]
    found = LINE.fullmatch(lines[-1])
    assert found, lines
    assert any(text.startswith("trying ring 2 on a copy") for text in told)
    assert lines[-1] in next(text for text in reversed(told) if "step 20/20" in text).splitlines()
    ran = report_of(first)["plan"]
    assert runs(ran, found["kept"]) == (not found["later"])
    assert re.fullmatch(re.escape(lines[-1]) + r" \([2-9] copies of the first step in [0-9.]+ s\)", ran["reasons"][-1])

    ran = report_of(second)["plan"]
    said = lines[-1].removesuffix(found["later"] or "")
    assert runs(ran, found["kept"]) and ran["reasons"][-1] == f"measured on these devices: {said}"
    assert not any("trying" in text for _, text in second.texts)
    assert relative_error(saved_latent(client, first), latent_of(client, graph)) <= ROUNDING


def test_plans_of_a_run_that_is_too_short_are_tried_after_it_while_no_prompt_runs(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    KEPT.unlink(missing_ok=True)
    graph = measured(stock_graph(tiny_models, seed=523, steps=10, width=64, height=96), tries="auto")
    graph["known"]["inputs"]["latency_s"] = 0.001
    first = client.queue(graph)
    assert "measured" not in report_of(first)["plan"]["reasons"][-1]
    assert not any("trying" in text for _, text in first.texts)
    end_s = time.monotonic() + 300
    while not KEPT.exists():
        assert time.monotonic() < end_s
        time.sleep(0.1)
    graph["sampler"]["inputs"] |= {"seed": 524, "steps": 3}
    said = report_of(client.queue(graph))["plan"]["reasons"][-1]
    assert LINE.fullmatch(said.removeprefix("measured on these devices: ")), said
