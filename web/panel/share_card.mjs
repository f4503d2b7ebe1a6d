/* A card of a run to post: its picture, devices, plan, speed-up, exactness, timeline and legend, as one PNG.

   All of it is of one report that is here: workers that end meanwhile change nothing. Drawn by 2D canvas alone. */

import { h, setText } from './dom.mjs'
import { copyPicture, download } from './exports.mjs'
import { alike as alikeTimes, relativeError, seconds, times } from './figures.mjs'
import { describeWork, ranksOfPlan, sameWork } from './report.mjs'
import { quoteText } from './told.mjs'
import { COLOURS, drawRows, rowsHeight } from './timeline_rows.mjs'

const [WIDTH, HEIGHT, EDGE] = [1200, 675, 40]
const INK = { ground: '#14171d', panel: '#1d222b', text: '#e8ebf0', quiet: '#a3adbd', accent: '#7fd08a' }
const MOST_TIMELINE = 186 // pixels, of however many ranks
const LARGER = 1.6 // so much larger is the card's timeline than the tab's: it is read as a small picture
const PICTURE = 330
const ROUNDING = /rounds|sage|attention3|int8/i

/**
 * Show the card of `report` with what can be done with it; resolves when it is drawn. `speedup`: { factor, one_s } over
 * one device where the server compared, and its `quote`; else the `benchmark` of the same work says it.
 */
export async function openShareCard({ report, benchmark, speedup, quote, graph, t, name }) {
  const canvas = h('canvas', { class: 'pdit-share-picture', role: 'img', 'data-testid': 'pdit-share-canvas' })
  const told = h('p', { class: 'pdit-quiet', role: 'status', 'data-testid': 'pdit-share-told' })
  const button = (key, onclick) => h('button', { type: 'button', class: 'pdit-button', text: t(`share.${key}`), onclick })
  const blob = () => new Promise((resolve) => canvas.toBlob(resolve, 'image/png'))
  const save = button('save', async () => download(`${name}-card.png`, await blob()))
  const copy = button('copy', async () => {
    const copied = await copyPicture(await blob())
    setText(told, t(copied ? 'share.copied' : 'share.refused'))
    if (!copied) save.focus()
  })
  const dialog = h(
    'dialog',
    { class: 'pdit pdit-share-card', 'data-testid': 'pdit-share-card', 'aria-label': t('share.title') },
    canvas,
    told,
    h('div', { class: 'pdit-buttons' }, save, copy, button('close', () => dialog.close()))
  )
  dialog.addEventListener('close', () => dialog.remove())
  dialog.addEventListener('keydown', (event) => event.stopPropagation()) // keys of the canvas below
  document.body.append(dialog)
  dialog.showModal()
  const facts = factsOf({ report, benchmark, speedup, quote, t })
  draw(canvas, report, facts, undefined, t)
  const picture = await graph.pictureOf?.(report)
  draw(canvas, report, facts, picture, t)
  canvas.setAttribute('aria-label', [facts.hero, ...facts.lines].join('; '))
  canvas.dataset.drawn = picture ? 'with picture' : 'without picture'
  if (!picture) setText(told, t('share.noPicture'))
}

/** What the card says of a run: { hero, lines, gained }, all of it measured; `gained`: no slower than one device. */
export function factsOf({ report, benchmark, speedup, quote, t }) {
  const { headline, plan } = report
  const alike = benchmark && (benchmark === report || sameWork(report, benchmark)) ? benchmark : report
  const rows = alike.speedups ?? []
  const row = rows.find((each) => each.kind === 'plan' && each.name === plan?.name)
  const one = rows.find((each) => each.kind === 'one_rank')
  const steps = alike.raw?.sampling?.steps
  const factor = speedup?.factor ?? row?.speedup
  const one_s = speedup?.one_s ?? (one && steps > 0 ? one.median_s / steps : undefined)
  const step_s = speedup?.plan_s ?? (row && steps > 0 ? row.median_s / steps : headline?.step_s)
  const known = Number.isFinite(factor)
  const step = Number.isFinite(step_s) ? t('share.step', { time: seconds(step_s) }) : ''
  const compared = known && Number.isFinite(one_s)
  const here = Number.isFinite(headline?.step_s) && t('share.here', { time: seconds(headline.step_s) })
  const elsewhere = row && speedup === undefined && alike !== report // in a benchmark: this run's own seconds too
  const told = elsewhere ? 'measured' : 'instead'
  const [time, single] = alikeTimes(step_s, one_s)
  return {
    gained: !known || factor >= 1,
    hero: known ? heroOf(factor, t) : step || t('title'),
    lines: [
      compared ? t(`share.${told}`, { time, one: single }) : known ? step : '',
      elsewhere ? here : '',
      devicesOf(report, t),
      describeWork(report, t),
      (quote?.exact && quoteText(quote, t)) || exactness(report, row, t)
    ].filter(Boolean)
  }
}

/* A loss is told the way round in which it is a gain: of one device. */
function heroOf(factor, t) {
  return factor < 1 ? t('share.slower', { factor: times(1 / factor) }) : t('share.speedup', { factor: times(factor) })
}

function devicesOf(report, t) {
  const found = Array.isArray(report.raw?.devices) ? report.raw.devices : []
  const names = ranksOfPlan(report).map((rank) => found.find((each) => each?.name === rank.device)?.model ?? rank.device)
  const counts = new Map()
  for (const each of names) counts.set(each, (counts.get(each) ?? 0) + 1)
  const devices = [...counts].map(([device, count]) => t('share.devices', { count, device })).join(', ')
  return [report.plan?.name, devices].filter(Boolean).join(' · ')
}

function exactness(report, row, t) {
  const { proof, step_caches, exchange } = report.raw ?? {}
  if (step_caches?.length) return t('share.cached')
  if (exchange) return t('share.rounded', { exchange })
  if (report.plan?.degrees?.pipefusion > 1) return t('share.stale')
  if (Number.isFinite(row?.error)) return t('share.exact', { error: relativeError(row.error) })
  if (attendedRounding(report.raw)) return t('share.notCompared') // what is proven is the plan, with exact kernels
  if (proof?.verdict === 'proven') return t('share.proven', { error: relativeError(proof.error) })
  return t('share.notCompared')
}

/* By the names of the kernels, as the server tells (ROUNDING of parallel_runtime/report/compare.py). */
function attendedRounding(raw) {
  const ranks = Array.isArray(raw?.ranks) ? raw.ranks : []
  return ranks.some((rank) => ROUNDING.test(String(rank?.attention ?? '')))
}

function draw(canvas, report, facts, picture, t) {
  canvas.width = WIDTH
  canvas.height = HEIGHT
  const brush = canvas.getContext('2d')
  const write = (text, font, x, y, colour = INK.text, most = WIDTH - x - EDGE) => {
    brush.fillStyle = colour
    brush.font = `${font} system-ui, sans-serif`
    brush.fillText(text, x, y, most)
  }
  brush.fillStyle = INK.ground
  brush.fillRect(0, 0, WIDTH, HEIGHT)
  write(t('title'), '600 30px', EDGE, 62)
  const { versions } = report.raw ?? {}
  const made = [versions?.pack && `parallel-dit ${versions.pack}`, versions?.comfyui && `ComfyUI ${versions.comfyui}`]
  brush.textAlign = 'right'
  write(made.filter(Boolean).join(' · '), '16px', WIDTH - EDGE, 60, INK.quiet, 600)
  brush.textAlign = 'left'
  let left = EDGE
  if (picture) {
    drawPicture(brush, picture, EDGE, 92)
    left += PICTURE + 36
  }
  write(facts.hero, '700 50px', left, 160, facts.gained ? INK.accent : INK.text)
  facts.lines.forEach((line, at) => write(line, at ? '22px' : '26px', left, 216 + at * 40, at ? INK.quiet : INK.text))
  drawTimeline(brush, report, t)
}

function drawPicture(brush, picture, x, y) {
  brush.fillStyle = INK.panel
  brush.fillRect(x, y, PICTURE, PICTURE)
  const scale = PICTURE / Math.max(picture.width, picture.height)
  const [width, height] = [picture.width * scale, picture.height * scale]
  brush.drawImage(picture, x + (PICTURE - width) / 2, y + (PICTURE - height) / 2, width, height)
}

/* The very rows of the tab, drawn larger on a canvas out of sight, since they are as wide as theirs. */
function drawTimeline(brush, report, t) {
  if (!report.ranks.some((rank) => rank.begin)) return
  const [width, height] = [WIDTH - 2 * EDGE, Math.min(MOST_TIMELINE, rowsHeight(report.ranks.length) * LARGER)]
  const size = `width:${width / LARGER}px;height:${height / LARGER}px`
  const place = `position:fixed;left:-9999px;${size};--input-text:${INK.quiet}`
  const rows = h('canvas', { style: place })
  document.body.append(rows)
  drawRows(rows, report.ranks, [0, Math.max(report.end_s, 1e-6)], LARGER)
  const top = HEIGHT - 54 - height
  brush.drawImage(rows, EDGE, top, width, height)
  rows.remove()
  brush.font = '15px system-ui, sans-serif'
  let x = EDGE
  for (const [name, colour] of Object.entries(COLOURS)) {
    brush.fillStyle = colour
    brush.fillRect(x, HEIGHT - 32, 12, 12)
    brush.fillStyle = INK.quiet
    brush.fillText(t(`charts.${name}`), x + 18, HEIGHT - 21)
    x += 42 + brush.measureText(t(`charts.${name}`)).width
  }
}
