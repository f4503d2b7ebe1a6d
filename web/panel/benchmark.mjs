/* The benchmark's bars beside the timeline: what they are of, and the plans that can be taken over. */

import { h, keyed, setText } from './dom.mjs'
import { againstBase, describeWork, sameWork } from './report.mjs'
import { inWords } from './words.mjs'

const ROW_HEIGHT = 26
const AXIS_HEIGHT = 34

/** The figure, empty; `usePlan(plan)` sets SP Config. */
export function makeBenchmark(t, usePlan) {
  const canvas = h('canvas', { role: 'img', 'aria-label': t('charts.speedups') })
  const figure = h(
    'figure',
    { 'data-chart': 'speedups', hidden: '' },
    h('figcaption', {}),
    h('div', {}, canvas),
    h('div', { class: 'pdit-buttons', role: 'group', 'aria-label': t('benchmark.use') })
  )
  figure.usePlan = usePlan
  return figure
}

/** Draw the benchmark that belongs to a run: itself, or the last one where that is of the same file and size. */
export function updateBenchmark(figure, report, last, charts, t) {
  const [caption, , buttons] = figure.children
  const canvas = figure.querySelector('canvas')
  const source = report.speedups.length ? report : last && sameWork(report, last) ? last : undefined
  const cases = (source?.speedups ?? []).map((row) => ({ ...row, name: inWords(t, row.name) }))
  const { base, rows } = againstBase(cases)
  const measured = rows.filter((row) => Number.isFinite(row.factor))
  figure.hidden = measured.length === 0
  if (figure.hidden) return charts.clear(canvas)
  const of = describeWork(source, t)
  setText(caption, [t('benchmark.of', { base: base.name }), of].filter(Boolean).join(' · '))
  canvas.setAttribute('aria-label', [caption.textContent, ...measured.map(charts.barText)].join('; '))
  canvas.parentElement.style.height = `${measured.length * ROW_HEIGHT + AXIS_HEIGHT}px`
  if (charts.loaded) charts.speedups(canvas, measured, t)
  const plans = measured.filter((row) => row.plan?.degrees).sort((a, b) => b.factor - a.factor)
  keyed(
    buttons,
    figure.usePlan ? plans : [],
    (row) => JSON.stringify(row.plan),
    (row) => h('button', { type: 'button', class: 'pdit-button', onclick: () => figure.usePlan(row.plan) }),
    (button, row) => setText(button, t('benchmark.usePlan', { plan: row.name }))
  )
}
