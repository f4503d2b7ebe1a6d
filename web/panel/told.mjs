/* A run in words, from the summary that the server keeps of it: how much faster, where its time went, what to try.

   Owns the words and what is made prominent. Which runs compare is the server's to say; nothing is computed here. */

import { alike, percent, ratio, relativeError, roughly, seconds } from './figures.mjs'

const SAME = 1.02 // less than this is no difference

/** The plan as people call it. */
export function planName(summary, t) {
  return summary.ranks === 1 ? t('hero.oneDevice') : (summary.plan ?? '')
}

/** `1.5× faster: 0.28 s a step instead of 0.42 s`, over one device; '' where there is nothing to compare with. */
export function heroText(summary, t) {
  const found = summary?.speedup
  if (!Number.isFinite(found?.factor) || !(found.factor > 0)) return ''
  const { factor } = found
  const [plan_time, one_time] = alike(found.plan_s, found.one_s)
  const times = { plan_time, one_time }
  const text =
    factor >= SAME
      ? t('hero.faster', { factor: ratio(factor), ...times })
      : factor * SAME <= 1
        ? t('hero.slower', { factor: ratio(1 / factor), ...times })
        : t('hero.same', times)
  return summary.ranks === 1 ? t('hero.with', { plan: found.plan, text }) : text
}

/** What the figure is over: the other run, by its number. */
export function heroNote(summary, t) {
  const found = summary?.speedup
  if (!found) return ''
  if (found.kind === 'benchmark') return t('hero.overBenchmark', { number: found.number })
  return t(summary.ranks === 1 ? 'hero.overPlan' : 'hero.overRun', { number: found.number })
}

/** What a person quotes: `2 devices: 1.83×; difference as between two exact kernels of one device (6.1e-3, bfloat16)`;
    '' without a run on one device. */
export function quoteText(quote, t) {
  const { devices, factor, exact, error, dtype } = quote ?? {}
  if (!(devices > 1) || !Number.isFinite(factor) || !(factor > 0)) return ''
  const speed = t('quote.speed', { devices, factor: factor.toFixed(2) })
  if (exact === 'proven' && Number.isFinite(error))
    return t('quote.proven', { speed, error: relativeError(error), dtype })
  return exact === 'whole' ? t('quote.whole', { speed }) : speed
}

/** Whether the run could be held against one device if that were measured. */
export function lacksOneDevice(summary) {
  return summary?.comparable === true && summary.ranks > 1 && summary.speedup === undefined
}

/** `84 % computing, 15 % waiting: good`; '' where it was not measured. */
export function verdictText(summary, t) {
  const shares = summary?.shares
  if (!shares || !summary.verdict) return ''
  const waiting = shares.communication + shares.idle
  return t(`verdict.${summary.verdict}`, { computing: percent(shares.compute), waiting: percent(waiting) })
}

/** What to try instead; '' where nothing better is known. */
export function suggestionText(summary, t) {
  const found = summary?.suggestion
  if (!found || !Number.isFinite(found.factor)) return ''
  return t(found.by === 'predicted' ? 'verdict.predicted' : 'verdict.measured', {
    plan: suggestedName(found, t),
    factor: ratio(found.factor)
  })
}

/** The suggested plan as people call it. */
export function suggestedName(found, t) {
  return found.plan === 'single' ? t('hero.oneDevice') : found.plan
}

/** `832 × 480`, with the frames of a video and the number of images beyond one. */
function sizeText(summary, t) {
  const { width, height, frames, batch, images } = summary
  if (!width || !height) return ''
  const many = images ?? batch
  const size = width === height ? `${width} px` : `${width} × ${height}`
  return [
    size,
    frames > 1 ? t('figures.frames', { frames }) : '',
    many > 1 ? t('figures.images', { images: many }) : ''
  ]
    .filter(Boolean)
    .join(', ')
}

/** An entry of a list of runs: `#3, uly2, 256 px, 0.28 s`. */
export function runName(entry, t) {
  const summary = entry.summary ?? {}
  const named = entry.kind === 'denoise' ? planName(summary, t) : t(`kinds.${entry.kind}`)
  const took = Number.isFinite(summary.step_s) ? t('figures.step', { time: seconds(summary.step_s) }) : ''
  const parts = [named || t(`kinds.${entry.kind}`), sizeText(summary, t), took]
  return `#${entry.number}, ${parts.filter(Boolean).join(', ')}`
}

/** `step 7 of 20 · 0.28 s a step · about 4 s left`; of a benchmark, its runs. */
export function liveText(run, t) {
  if (!Number.isFinite(run?.steps)) return t('live.working')
  const number = { step: Math.min(run.step + 1, run.steps), steps: run.steps }
  const parts = [t(run.class === 'ParallelBenchmark' ? 'states.run' : 'states.step', number)]
  if (Number.isFinite(run.left_s) && run.left_s >= 1)
    parts.push(t('live.left', { time: roughly(run.left_s) }))
  return parts.join(' · ')
}

/** How much of the run is done, 0 to 1; 0 where nobody knows. */
export function liveShare(run) {
  return run?.steps > 0 ? Math.min(1, Math.max(0, run.step / run.steps)) : 0
}
