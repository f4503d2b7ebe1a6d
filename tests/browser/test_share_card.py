"""What of a run is given to others: the card to share, the timeline's picture, the benchmark; all measured."""

import base64
import io
import re
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect

from .made_up import CLIPBOARD, DRAWN_TEXTS, NO_CLIPBOARD, MadeUp, a_pool, a_report, named

PROMPT = "0" * 8
NO_WEBGL = """() => {
  const get = HTMLCanvasElement.prototype.getContext
  HTMLCanvasElement.prototype.getContext = function (kind, ...all) {
    return kind.startsWith('webgl') ? null : get.call(this, kind, ...all)
  }
}"""
COPIED = """async () => {
  const [item] = await navigator.clipboard.read()
  const bitmap = await createImageBitmap(await item.getType('image/png'))
  return [bitmap.width, bitmap.height] }"""


def with_picture(made_up: MadeUp) -> None:
    """The history of a prompt whose picture is red, with a chart that is no picture of the run."""
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), (250, 10, 10)).save(picture, "PNG")
    files = [{"filename": name, "subfolder": "", "type": "output"} for name in ("red.png", "chart.png")]
    queued = {"1": {"class_type": "SaveImage"}, "2": {"class_type": "ShowTimingReport"}}
    outputs = {"1": {"images": files[:1]}, "2": {"images": files[1:]}}

    page = made_up.comfy.page
    page.route(
        re.compile(f"/history/{PROMPT}$"),
        lambda r: r.fulfill(json={PROMPT: {"prompt": [0, PROMPT, queued], "outputs": outputs}}),
    )
    page.route(re.compile(r"/view\?.*red\.png"), lambda r: r.fulfill(body=picture.getvalue(), content_type="image/png"))


WORK: dict[str, Any] = {
    "model": {"file": "a.safetensors", "dtype": "bfloat16"},
    "devices": [{"name": f"cuda:{n}", "kind": "cuda", "model": "RTX 3090"} for n in range(2)],
}


def of_a_benchmark(number: int, **sizes: int) -> dict[str, Any]:
    """One rank, stock ComfyUI and two plans, of these sizes."""
    pair = {"name": "uly2", "ranks": 2, "weights": "replicated", "degrees": {"ulysses": 2, "ring": 1}}
    ring = pair | {"name": "ring2", "degrees": {"ring": 2}}
    cases = [
        {"name": "one rank", "kind": "one_rank", "median_s": 2.0},
        {"name": "ComfyUI, one device", "kind": "one_process", "median_s": 2.5, "speedup": 0.8},
        {"name": "uly2", "kind": "plan", "plan": pair, "median_s": 1.25, "speedup": 1.6, "error": 4.7e-7},
        {"name": "ring2", "kind": "plan", "plan": ring, "median_s": 5.0, "speedup": 0.4, "error": 4.7e-7},
    ]
    benchmark = {"schema": "parallel-dit/report/1", "kind": "benchmark", "contenders": cases, "sizes": sizes}
    return named(benchmark | WORK | {"sampling": {"steps": number}})


def of_a_run(**sizes: int) -> dict[str, Any]:
    """Two ranks with the plan uly2, of these sizes."""
    plan = {"name": "uly2", "weights": "replicated", "degrees": {"ulysses": 2}}
    return named(a_report(2, 4, plan=plan, sizes=sizes, prompt_id=PROMPT, sampling={"steps": 4}, **WORK))


def test_a_card_to_share_shows_the_run_and_survives_what_happens_meanwhile(made_up: MadeUp) -> None:
    page, size = made_up.comfy.page, {"width": 64, "height": 64}
    with_picture(made_up)
    timeline = made_up.comfy.open_timeline()
    reports = [made_up.report(1, of_a_benchmark(4, **size)), made_up.report(2, of_a_run(**size))]
    made_up.tell(pools=[a_pool()], reports=reports)
    expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", "2x4")
    page.evaluate(NO_WEBGL)
    page.evaluate(DRAWN_TEXTS)
    timeline.get_by_role("button", name="Share").click()
    canvas, told = page.get_by_test_id("pdit-share-canvas"), page.get_by_test_id("pdit-share-told")
    made_up.tell(pools=[a_pool(state="failed", last_failure="rank 1: killed", failed_rank=1)], reports=reports)
    expect(canvas).to_have_attribute("data-drawn", "with picture")
    written = " | ".join(page.evaluate("window.written"))
    for text in (
        "Parallel DiT",
        "1.60× as fast as one device",
        "0.31 s a step, one device 0.50 s",
        "uly2 · 2 × RTX 3090",
    ):
        assert text in written
    for text in ("a.safetensors · 64 × 64 · 4 steps", "4.7e-7", "compute", "communication", "idle", "0  cuda:0"):
        assert text in written
    assert page.evaluate("window.smallest") >= 15, "too small on a picture of 1200 pixels"
    picture = Image.open(io.BytesIO(base64.b64decode(canvas.evaluate("(c) => c.toDataURL()").partition(",")[2])))
    assert picture.size == (1200, 675)
    assert picture.convert("RGB").getpixel((200, 250)) == (250, 10, 10), "the run's picture, not the chart"
    made_up.comfy.shot("share-card", page.get_by_test_id("pdit-share-card"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy picture").click()
    expect(told).to_have_text("The picture is in the clipboard.")
    assert page.evaluate(COPIED) == [1200, 675]
    page.evaluate(NO_CLIPBOARD)
    page.get_by_role("button", name="Copy picture").click()
    expect(told).to_contain_text("Save the picture instead")
    expect(page.get_by_role("button", name="Save PNG")).to_be_focused()
    with page.expect_download() as found:
        page.keyboard.press("Enter")
    assert Image.open(found.value.path()).size == (1200, 675)
    page.evaluate(CLIPBOARD)
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("pdit-share-card")).to_have_count(0)
    expect(page.get_by_test_id("pdit-error-card")).to_contain_text("rank 1: killed")
    page.get_by_test_id("pdit-error-card").get_by_role("button", name="Close").click()


def test_a_card_of_an_older_or_lone_report_shows_what_is_known(made_up: MadeUp) -> None:
    page, timeline = made_up.comfy.page, made_up.comfy.open_timeline()
    card, canvas = page.get_by_test_id("pdit-share-card"), page.get_by_test_id("pdit-share-canvas")
    older = {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5], "plan_name": "ring2"}
    video = a_report(2, 4, sizes={"width": 832, "height": 480, "frames": 81}, sampling={"steps": 4})
    for number, (report, said, on_card) in enumerate([
        (older | {"plan": {"ring": 2}}, "0.50 s a step", "ring2"),
        (a_report(32, 100), "for 100 steps", "1 × cuda:31"),
        (of_a_benchmark(2), "1.60×", "1.60×"),
        (video, "for 4 steps", "832 × 480 · 81 frames · 4 steps"),
        (a_report(4, 5, plan={"name": "uly2", "ranks": 2}), "for 5 steps", "uly2 · 1 × cuda:0, 1 × cuda:1;"),
    ]):  # fmt: skip
        made_up.tell(reports=[made_up.report(number + 1, report)])
        expect(timeline).to_contain_text(said)
        timeline.get_by_role("button", name="Share").click()
        expect(canvas).to_have_attribute("data-drawn", "without picture")
        label = canvas.get_attribute("aria-label") or ""
        assert on_card in label and not re.search("undefined|null|NaN", label)
        card.get_by_role("button", name="Close").click()


SAID_OF = """async ([run, benchmark]) => {
  const { factsOf } = await import('/extensions/parallel-dit/panel/share_card.mjs')
  const { readReport } = await import('/extensions/parallel-dit/panel/report.mjs')
  const t = (key) => key
  return factsOf({ report: readReport(run), benchmark: benchmark && readReport(benchmark), t }) }"""
# What a benchmark says of the work that the run beside it did not do.
ASKED = {"steps": 4, "sampler": "euler", "cfg": 1.0, "denoise": 1.0}
LORA = {"name": "0123456789ab", "weights": 8, "strengths": [0.8], "side_branch": False}
OTHER_WORK: list[dict[str, Any]] = [
    {"model": {"file": "a.safetensors", "dtype": "float32"}},
    {"model": WORK["model"] | {"patches": LORA}},
    {"sizes": {"width": 64, "height": 64, "batch": 2}},
    *({"sampling": ASKED | each} for each in ({"steps": 5}, {"sampler": "heun"}, {"cfg": 3.5}, {"denoise": 0.5})),
    {"step_caches": [{"name": "EasyCache", "threshold": 0.2, "skipped": 1, "of": 4, "counts": "steps"}]},
]


def test_a_card_claims_no_exactness_with_a_step_cache_nor_the_speed_of_other_work(plain_page: Page) -> None:
    page, size, asked = plain_page, {"width": 64, "height": 64, "batch": 1}, {"sampling": ASKED}
    run = named(of_a_run(**size) | asked)
    proven = run | {"proof": {"verdict": "proven", "error": 1e-7}}
    cached = proven | OTHER_WORK[-1]
    assert "share.proven" in page.evaluate(SAID_OF, [proven, None])["lines"]
    assert page.evaluate(SAID_OF, [cached, None])["lines"][-1] == "share.cached"
    sage = proven | {"ranks": [each | {"attention": "SageAttention"} for each in proven["ranks"]]}
    assert page.evaluate(SAID_OF, [sage, None])["lines"][-1] == "share.notCompared"
    assert page.evaluate(SAID_OF, [proven | {"exchange": "fp8"}, None])["lines"][-1] == "share.rounded"
    assert page.evaluate(SAID_OF, [cached, of_a_benchmark(4, **size) | OTHER_WORK[-1]])["lines"][-1] == "share.cached"
    alike = named(of_a_benchmark(4, **size) | asked)
    assert page.evaluate(SAID_OF, [run, alike])["hero"] == "share.speedup"
    slow = alike | {"contenders": [each | {"speedup": 0.5} for each in alike["contenders"]]}
    assert page.evaluate(SAID_OF, [run, slow])["hero"] == "share.slower"
    for other in OTHER_WORK:
        assert page.evaluate(SAID_OF, [run, named(alike | other)])["hero"] == "share.step", other


def test_a_benchmark_is_against_stock_comfyui_and_stays_with_its_own_size(made_up: MadeUp) -> None:
    comfy, small, large = made_up.comfy, {"width": 64, "height": 64}, {"width": 512, "height": 512}
    comfy.load_example(mode="auto", ring=7)
    timeline = comfy.open_timeline()
    bars = timeline.locator("[data-chart=speedups]")
    benchmark = made_up.report(1, of_a_benchmark(4, **small))
    made_up.tell(reports=[benchmark, made_up.report(2, of_a_run(**small))])
    expect(bars).to_contain_text("ComfyUI, one device = 1× · a.safetensors · 64 × 64 · 4 steps")
    label = bars.locator("canvas").get_attribute("aria-label") or ""
    assert "ComfyUI, one device: 1.00×, 2.5 s" in label and "uly2: 2.00×, 1.3 s" in label and "ring2: 0.50×" in label
    made_up.tell(reports=[benchmark, made_up.report(3, of_a_run(**large))])
    expect(bars).to_be_hidden()
    made_up.tell(reports=[benchmark, made_up.report(4, of_a_run(**small))])
    bars.get_by_role("button", name="Use uly2").click()
    values = comfy.values("SPConfig")
    assert [values[name] for name in ("mode", "ulysses", "ring", "data", "devices")] == ["manual", 2, 1, 1, "cpu:2"]
    expect(comfy.toast("has the plan uly2 now")).to_be_visible()
    comfy.page.evaluate("app.graph.clear()")
    bars.get_by_role("button", name="Use uly2").click()
    expect(comfy.toast("no SP Config")).to_be_visible()
