"""A report in a few lines for people: on a node, in a terminal. Says nothing that the report does not hold."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

FASTER = 1.02  # less is drift of the machine
EXCHANGES = (("hand-over", "hand_over_s"), ("gather", "gather_s"))  # with the host


def describe(report: Mapping) -> str:
    """The report's headline figures, a line each."""
    return "\n".join(_lines(report))


def _lines(report: Mapping) -> Iterator[str]:
    if report["from_cache"]:
        yield f"served from ComfyUI's cache: nothing ran in this prompt, measured {report['created']}"
    yield from (f"warning: {text}" for text in report.get("warnings", []))
    if what := _what(report):
        yield what
    if "chosen_for" in report.get("plan", {}):
        yield f"plan chosen for {report['plan']['chosen_for']}"
    if report.get("proof", {}).get("verdict", "not proven") != "not proven":  # that one is among the warnings
        yield _proof_line(report["proof"])
    if report["kind"] == "denoise":
        yield from _run_lines(report)
    if report["kind"] == "benchmark":
        yield from _case_lines(report)
    if "vae" in report:
        vae = report["vae"]
        tiles = f", {vae['tiles']} tiles" if "tiles" in vae else ""
        yield f"VAE decode {_seconds(vae['decode_s'])} on {vae['device']}{tiles}, counted nowhere else"
    if report["kind"] == "benchmark":
        yield verdict(report)


def _proof_line(proof: Mapping) -> str:
    """Whether the plan computes what one device does, and by what that was found."""
    if proof["verdict"] == "proven":
        found = "found, " if "found" in proof else ""
        return f"{found}proven with this ComfyUI: error {proof['error']:.1e}, at most {proof['tolerance']:.0e}"
    return f"proof {proof['verdict']}: {proof['reason']}"


def _what(report: Mapping) -> str:
    sizes, words = report.get("sizes", {}), []
    if "image_tokens" in sizes:
        words.append(f"{sizes['image_tokens']} image + {sizes.get('text_tokens', 0)} text tokens")
    elif {"width", "height"} <= sizes.keys():
        frames = f", {sizes['frames']} latent frames" if "frames" in sizes else ""
        words.append(f"{sizes['width']} x {sizes['height']} px{frames}")
    if sizes.get("batch", 1) > 1:
        words.append(f"batch {sizes['batch']}")
    if "plan" in report:
        devices = report["devices"][: report["plan"]["ranks"]]  # others sleep
        words.append(f"plan {report['plan']['name']} on {', '.join(device['name'] for device in devices)}")
    if "model" in report:
        words.append(f"{report['model']['file']} in {report['model']['dtype']}")
    if "runs" in report:
        words.append(f"median of {report['runs']} after {report.get('warmup', 0)} warm-up, interleaved")
    return ", ".join(words)


def _run_lines(report: Mapping) -> Iterator[str]:
    timings = report["timings"]
    yield from _before_lines(report)
    if "denoise_s" in timings:
        steps = timings.get("step_s", [])
        each = f", {len(steps)} steps, median {_seconds(statistics.median(steps))} a step" if steps else ""
        first = f", first {_seconds(timings['first_step_s'])}" if "first_step_s" in timings else ""
        yield f"denoise {_seconds(timings['denoise_s'])}{each}{first}"
    if "loop" in report:
        reason = f": {report['loop']['reason']}" if "reason" in report["loop"] else ""
        yield f"loop: {report['loop']['kind']}{reason}"
    for cache in report.get("step_caches", []):
        skipped = f"{cache['skipped']} of {cache['of']} {cache['counts']} skipped"
        yield f"step cache {cache['name']} at {cache['threshold']:g}: {skipped}"
    if kept := report.get("kept"):
        yield (
            f"keys kept between steps: found in {kept['found']} of {kept['calls']} calls, {kept['bytes'] / 1e6:.1f} MB "
            f"a rank; tokens computed: {', '.join(map(str, kept['tokens']))}"
        )
    if timings.get("rank0_s"):
        rank0, slowest = (statistics.median(timings[name]) for name in ("rank0_s", "slowest_rank_s"))
        skew = f", skew {_seconds(max(timings['skew_s']))} at most" if "skew_s" in timings else ""
        yield f"rank 0 {_seconds(rank0)}, slowest rank {_seconds(slowest)} a step{skew}"
    for rank in report.get("ranks", []):
        if "busy_s" in rank:
            yield _rank_line(rank)


def _before_lines(report: Mapping) -> Iterator[str]:
    """What came before the first step."""
    timings = report["timings"]
    if "load_s" in timings:
        loads = [rank["load_s"] for rank in report.get("ranks", []) if "load_s" in rank]
        slowest = f", weights {_seconds(max(loads))} on the slowest rank" if loads else ""
        yield f"load {_seconds(timings['load_s'])}{slowest}"
    if "prepare_s" in timings:
        yield f"prepare {_seconds(timings['prepare_s'])} in the workers, before the first step"


def _rank_line(rank: Mapping) -> str:
    shares = [("compute", "compute_s"), ("communication", "communication_s"), ("idle", "idle_s")]
    parts = [f"{name} {_seconds(statistics.median(rank[key]))}" for name, key in shares if rank.get(key)]
    if rank.get("compute_s"):
        parts[0] += _of_it(rank.get("regions", {}))
    memory = rank.get("memory", {})
    held = memory.get("allocated_bytes", memory.get("resident_bytes"))
    where = (
        "" if held is None else f", {held / 1e9:.2f} GB {'allocated' if 'allocated_bytes' in memory else 'resident'}"
    )
    busy = f", device {rank['utilisation']:.0%} busy" if "utilisation" in rank else ""
    return f"  rank {rank['rank']} {rank['device']}: {', '.join(parts)}{where}{busy}"


def _of_it(regions: Mapping) -> str:
    """What of a rank's computing was taking its data and writing it, where a usual step has any."""
    found = [(name, statistics.median(regions.get(key) or [0])) for name, key in EXCHANGES]
    words = [f"{name} {_seconds(seconds)}" for name, seconds in found if seconds]
    return f" ({', '.join(words)} of it)" if words else ""


def _case_lines(report: Mapping) -> Iterator[str]:
    cases: Sequence[Mapping] = report["contenders"]
    width = max(len(each["name"]) for each in cases)
    for each in cases:
        spread = f" +- {_seconds(each['spread_s'] / 2)}" if "spread_s" in each else ""
        more = [f"{each['speedup']:.2f}x one rank"] if "speedup" in each else []
        if "speedup_over_one_process" in each:
            more.append(f"{each['speedup_over_one_process']:.2f}x one process")
        if "block_speedup" in each:
            more.append(f"blocks alone {each['block_speedup']:.2f}x, kept {each['end_to_end_over_block']:.2f}")
        if "loop" in each:
            reason = f" ({each['loop']['reason']})" if "reason" in each["loop"] else ""
            more.append(f"{each['loop']['kind']} loop{reason}")
        if "compile_s" in each:
            more.append(f"{each['graphs']} graphs made in {_seconds(each['compile_s'])}")
        if "error" in each:
            more.append(f"error {each['error']:.1e}")
        if "stale_difference" in each:
            more.append(f"{each['stale_difference']:.1e} from one rank by keys a step old")
        yield f"  {each['name']:{width}}  {_seconds(each['median_s'])}{spread}" + "".join(f", {part}" for part in more)


def verdict(report: Mapping) -> str:
    """Of a benchmark, whether plans pay: `uly2 is 1.46x faster than one device`."""
    for gain, base in (("speedup", "one device"), ("speedup_over_one_process", "ComfyUI in one process")):
        plans = [each for each in report["contenders"] if each["kind"] == "plan" and gain in each]
        if not plans:
            continue
        best = max(plans, key=lambda each: each[gain])
        if best[gain] >= FASTER:
            return f"{best['name']} is {best[gain]:.2f}x faster than {base}"
        return f"no plan is faster than {base}: {best['name']}, the best, reaches {best[gain]:.2f}x"
    return "one device was not timed, so nothing says whether a plan is faster"


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.2f} s"
