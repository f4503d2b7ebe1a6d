/* From a report of any version to what is drawn. Owns what of a report can be trusted; draws nothing.

   `readReport` never throws: what cannot be read becomes a `problem` in words, what was not measured stays absent. */

import { largest, median } from './figures.mjs'

export const SCHEMA = 'parallel-dit/report/1'
const MEMORY = ['allocated_bytes', 'reserved_bytes', 'resident_bytes']

/**
 * { kind, problem, older, plan, ranks, steps, end_s, memory, traffic, speedups, headline, raw }
 *
 * ranks: [{ rank, device, begin, compute, communication, idle }], seconds by step; a rank without times has none.
 * traffic: [{ rank, device, sent_bytes, waited_s, rate }], of a step on average; what was not measured is absent.
 * steps: seconds of each step. problem: a key of the words, '' when all is well.
 */
export function readReport(report) {
  const empty = {
    kind: '',
    problem: '',
    older: false,
    ranks: [],
    steps: [],
    end_s: 0,
    memory: [],
    traffic: [],
    speedups: [],
    raw: report
  }
  if (report === null || typeof report !== 'object' || Array.isArray(report))
    return { ...empty, problem: 'report.none' }
  const kind = typeof report.kind === 'string' ? report.kind : ''
  if (report.schema === SCHEMA) return { ...empty, ...readCurrent(report), kind }
  if (report.schema === 1) return { ...empty, ...readFirst(report), kind, older: true }
  return { ...empty, kind, problem: 'report.unknown' }
}

function readCurrent(report) {
  const best = fastest(report)
  const source = Array.isArray(report.ranks) && report.ranks.length ? report.ranks : (best?.ranks ?? [])
  const timings = report.timings ?? {}
  const ranks = source.map(readRank)
  const steps = numbers(timings.step_s) ?? stepTimes(ranks)
  return finish({
    ranks,
    steps,
    plan: report.plan ?? best?.plan,
    memory: source.map((rank) => readMemory(rank, report.devices)),
    traffic: source.map((rank, index) => readTraffic(rank, index)),
    speedups: readSpeedups(report),
    headline: {
      step_s: median(steps),
      skew: skew(numbers(timings.skew_s), steps),
      speedup: report.kind === 'benchmark' ? best?.speedup : undefined,
      denoise_s: timings.denoise_s,
      decode_s: report.kind === 'vae' ? report.vae?.decode_s : undefined,
      loop: report.loop?.kind
    },
    warnings: texts(report.warnings),
    fromCache: report.from_cache === true
  })
}

/** The first released format: seconds of each call and, of these, in communication; no times of day. */
function readFirst(report) {
  const walls = numbers(report.call_s) ?? []
  const starts = running(walls)
  const ranks = list(report.ranks).map((rank, index) => {
    const busy = numbers(rank?.call_s)
    const communication = numbers(rank?.communication_s) ?? busy?.map(() => 0)
    const base = { rank: rank?.rank ?? index, device: String(rank?.device ?? '') }
    if (!busy || busy.length !== walls.length || communication.length !== busy.length) return base
    const compute = busy.map((value, step) => Math.max(0, value - communication[step]))
    const idle = busy.map((value, step) => Math.max(0, walls[step] - value))
    return { ...base, begin: starts, compute, communication, idle }
  })
  const steps = numbers(report.step_s) ?? walls
  return finish({
    ranks,
    steps,
    plan: report.plan && { ...report.plan, name: report.plan_name, degrees: report.plan },
    memory: list(report.ranks).map((rank) => readMemory(rank, [])),
    speedups: [],
    headline: {
      step_s: median(steps),
      skew: busySkew(ranks),
      denoise_s: report.denoise_s,
      decode_s: report.vae_decode_s
    },
    warnings: texts(report.warnings),
    fromCache: false
  })
}

function finish(view) {
  const ends = view.ranks
    .filter((rank) => rank.begin)
    .map((rank) => {
      const last = rank.begin.length - 1
      return last < 0 ? 0 : rank.begin[last] + rank.compute[last] + rank.communication[last] + rank.idle[last]
    })
  const end_s = largest(ends)
  const told = view.ranks.length || view.speedups.length || view.steps.length || Number.isFinite(view.headline.decode_s)
  return { ...view, end_s, problem: told ? '' : 'report.nothing' }
}

function readRank(rank, index) {
  const base = { rank: rank?.rank ?? index, device: String(rank?.device ?? '') }
  const busy = numbers(rank?.busy_s)
  if (!busy) return base
  const communication = numbers(rank.communication_s) ?? busy.map(() => 0)
  const compute = numbers(rank.compute_s) ?? busy
  const idle = numbers(rank.idle_s) ?? busy.map(() => 0)
  const walls = busy.map((value, step) => value + (idle[step] ?? 0))
  const begin = numbers(rank.begin_s) ?? running(walls)
  const same = [communication, compute, idle, begin].every((series) => series.length === busy.length)
  return same ? { ...base, begin, compute, communication, idle } : base
}

function readMemory(rank, devices) {
  const found = { rank: rank?.rank, device: String(rank?.device ?? '') }
  for (const name of MEMORY) if (Number.isFinite(rank?.memory?.[name])) found[name] = rank.memory[name]
  const device = list(devices).find((each) => each?.name === found.device)
  if (Number.isFinite(device?.memory_bytes)) found.memory_bytes = device.memory_bytes
  return found
}

/* Bytes of activations and weights that a rank sent, and how long it waited for others: `rate` is the one by the other.
   A loop inside the workers counts its bytes over the whole run. */
function readTraffic(rank, index) {
  const found = { rank: rank?.rank ?? index, device: String(rank?.device ?? '') }
  const waited = numbers(rank?.communication_s)
  const numSteps = numbers(rank?.busy_s)?.length ?? 0
  const sent = totalSent(rank)
  if (numSteps === 0) return found
  if (sent !== undefined) found.sent_bytes = sent / numSteps
  if (waited?.length === numSteps) found.waited_s = sum(waited) / numSteps
  if (sent !== undefined && found.waited_s > 0) found.rate = sent / sum(waited)
  return found
}

function totalSent(rank) {
  if (Number.isFinite(rank?.run_sent_bytes)) return rank.run_sent_bytes + (rank.run_weight_bytes ?? 0)
  const sent = numbers(rank?.sent_bytes)
  return sent && sum(sent) + sum(numbers(rank.weight_bytes) ?? [])
}

function readSpeedups(report) {
  return list(report.contenders)
    .filter((each) => Number.isFinite(each?.median_s))
    .map((each) => ({
      name: String(each.name ?? each.kind ?? ''),
      kind: each.kind,
      median_s: each.median_s,
      speedup: each.kind === 'one_rank' ? 1 : each.speedup,
      spread_s: each.spread_s,
      error: each.error,
      plan: each.kind === 'plan' ? each.plan : undefined
    }))
}

/**
 * A benchmark's cases as multiples of stock ComfyUI, the quickest of several, or of one rank where stock was not timed:
 * { base, rows }, each row with its `factor`; without either, rows have none.
 */
export function againstBase(speedups) {
  const stock = speedups.filter((row) => row.kind === 'one_process').sort((a, b) => a.median_s - b.median_s)[0]
  const base = stock ?? speedups.find((row) => row.kind === 'one_rank')
  const rows = speedups.map((row) =>
    base && row.median_s > 0 ? Object.assign(row, { factor: base.median_s / row.median_s }) : row
  )
  return { base, rows }
}

/** File, size and steps of a report, as far as it says them: what a chart or a card is of. */
export function describeWork({ raw }, t) {
  const { width, height, frames, images, batch } = raw?.sizes ?? {}
  const many = images ?? batch
  const steps = raw?.sampling?.steps ?? raw?.steps
  return [
    raw?.model?.file,
    Number.isFinite(width) && Number.isFinite(height) && `${width} × ${height}`,
    frames > 1 && t('work.frames', { frames }),
    many > 1 && t('work.images', { images: many }),
    Number.isFinite(steps) && t(steps === 1 ? 'work.oneStep' : 'work.steps', { steps })
  ]
    .filter((each) => typeof each === 'string')
    .join(' · ')
}

/** The ranks that the plan has, of as many as the workers are: others sleep. */
export function ranksOfPlan({ ranks, plan }) {
  return Number.isInteger(plan?.ranks) ? ranks.slice(0, plan.ranks) : ranks
}

/** The plan, its devices, and the work of a report, in a line. */
export function describeRun(report, t) {
  const devices = ranksOfPlan(report).map((rank) => rank.device).filter(Boolean)
  const first = devices.length > 4 ? `${devices[0]} … ${devices.at(-1)}` : devices.join(', ')
  const plan = [report.plan?.name, first].filter(Boolean)
  return [plan.length === 2 ? t('node.plan', { plan: plan[0], devices: plan[1] }) : plan[0], describeWork(report, t)]
    .filter(Boolean)
    .join(' · ')
}

/** Whether two reports, or a case of each, sampled the same: undefined where one does not say what it sampled. */
export function sameWork(a, b) {
  const [works, others] = [worksOf(a), worksOf(b)]
  return works.length && others.length ? works.some((work) => others.includes(work)) : undefined
}

/* What the server named so: the rule by which runs compare is its own (parallel_runtime/report/compare.py). */
function worksOf({ raw }) {
  return [raw, ...list(raw?.contenders)].map((each) => each?.work).filter((work) => typeof work === 'string')
}

function fastest(report) {
  const plans = list(report.contenders).filter((each) => each?.kind === 'plan' && Number.isFinite(each.median_s))
  return plans.sort((a, b) => a.median_s - b.median_s)[0]
}

function stepTimes(ranks) {
  const timed = ranks.find((rank) => rank.begin)
  return timed ? timed.begin.map((_, step) => timed.compute[step] + timed.communication[step] + timed.idle[step]) : []
}

function skew(skews, steps) {
  return skews?.length ? median(skews) / median(steps) : undefined
}

function busySkew(ranks) {
  const timed = ranks.filter((rank) => rank.begin?.length)
  if (timed.length < 2) return undefined
  const busy = timed.map((rank) => median(rank.compute.map((value, step) => value + rank.communication[step])))
  return (largest(busy) - busy.reduce((least, value) => Math.min(least, value))) / largest(busy)
}

/** A list of finite numbers, or undefined. */
function numbers(value) {
  return Array.isArray(value) && value.every(Number.isFinite) ? value : undefined
}

function sum(values) {
  return values.reduce((all, value) => all + value, 0)
}

function running(walls) {
  let at = 0
  return walls.map((wall) => (at += wall) - wall)
}

function list(value) {
  return Array.isArray(value) ? value : []
}

function texts(value) {
  return list(value).filter((each) => typeof each === 'string')
}
