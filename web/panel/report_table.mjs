/* A report as tables with rows, on Show Timing Report: the figures of a run and of its ranks, or the benchmark's cases. */

import { h } from './dom.mjs'
import { bytes, largest, median, relativeError, seconds, times } from './figures.mjs'
import { againstBase, describeWork, ranksOfPlan, readReport } from './report.mjs'
import { inWords } from './words.mjs'

/** Fill `box` with a table for each report, of whatever version. */
export function showTables(box, reports, t) {
  box.replaceChildren(...reports.flatMap((raw) => tablesOf(readReport(raw), t)))
}

function tablesOf(report, t) {
  if (report.problem) return [h('p', { text: t(report.problem) })]
  const told = [
    report.fromCache && t('table.fromCache'),
    report.older && t('report.older'),
    ...(report.warnings ?? []).map((text) => inWords(t, text))
  ].filter(Boolean)
  const caption = [t(`kinds.${report.kind}`), describeWork(report, t)].filter(Boolean).join(' · ')
  const body = report.speedups.length ? [casesTable(report, caption, t)] : [figuresTable(report, caption, t)]
  if (!report.speedups.length && report.ranks.some((rank) => rank.begin)) body.push(ranksTable(report, t))
  return [...told.map((text) => h('p', { class: 'pdit-note', text })), ...body]
}

function casesTable(report, caption, t) {
  const { base, rows } = againstBase(report.speedups.map((row) => ({ ...row, name: inWords(t, row.name) })))
  const best = largest(rows.map((row) => row.factor ?? 0))
  const withError = rows.some((row) => Number.isFinite(row.error))
  const head = [t('table.case'), t('table.time'), t('table.factor', { base: base?.name ?? '–' })]
  return table(
    caption,
    withError ? [...head, t('table.error')] : head,
    rows.map((row) => ({
      best: row.factor === best,
      cells: [
        row.name,
        seconds(row.median_s),
        times(row.factor),
        ...(withError ? [row === base ? '–' : relativeError(row.error)] : [])
      ]
    })),
    report.headline.decode_s === undefined ? [] : [[t('table.decode'), seconds(report.headline.decode_s)]]
  )
}

function figuresTable(report, caption, t) {
  const { raw, headline } = report
  const timings = raw.timings ?? {}
  const devices = ranksOfPlan(report).map((rank) => rank.device).join(', ')
  const rows = [
    ['plan', report.plan?.name && [report.plan.name, devices].filter(Boolean).join(' · ')],
    ['step', Number.isFinite(headline.step_s) && seconds(headline.step_s)],
    ['total', Number.isFinite(headline.denoise_s) && seconds(headline.denoise_s)],
    ['load', Number.isFinite(timings.load_s) && seconds(timings.load_s)],
    ['decode', Number.isFinite(headline.decode_s) && seconds(headline.decode_s)],
    ['loop', typeof headline.loop === 'string' && inWords(t, headline.loop)],
    ['proof', proofInWords(raw.proof, t)]
  ]
  const shown = rows.filter(([, value]) => value).map(([name, value]) => ({ cells: [t(`table.${name}`), value] }))
  return table(caption, [], shown)
}

function proofInWords(proof, t) {
  if (proof?.verdict === 'proven' && proof.found) return t('table.foundProven')
  return typeof proof?.verdict === 'string' && inWords(t, proof.verdict)
}

function ranksTable(report, t) {
  const memory = new Map(report.memory.map((row) => [row.rank, row.allocated_bytes ?? row.resident_bytes]))
  const rows = report.ranks
    .filter((rank) => rank.begin)
    .map((rank) => ({
      cells: [
        `${rank.rank} ${rank.device}`,
        ...['compute', 'communication', 'idle'].map((name) => seconds(median(rank[name]))),
        bytes(memory.get(rank.rank))
      ]
    }))
  const head = [
    t('table.rank'),
    t('charts.compute'),
    t('charts.communication'),
    t('charts.idle'),
    t('table.memory')
  ]
  return table(t('table.aStep'), head, rows)
}

function table(caption, head, rows, more = []) {
  const cells = (row) => row.map((text, at) => h(at ? 'td' : 'th', at ? { text } : { scope: 'row', text }))
  return h(
    'table',
    {},
    h('caption', { text: caption }),
    head.length ? h('tr', {}, ...head.map((text) => h('th', { scope: 'col', text }))) : null,
    ...rows.map((row) => h('tr', { 'data-best': row.best ? 'true' : null }, ...cells(row.cells))),
    ...more.map((row) => h('tr', {}, ...cells(row)))
  )
}
