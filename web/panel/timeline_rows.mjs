/* The timeline itself: a row a rank, compute, communication and idle along the time, on one canvas.

   Where a step is narrower than two pixels, a column of pixels shows the shares of the time it stands for: ten thousand
   steps of 64 ranks are drawn as quickly as ten. Within a step only the sums are known, not their order. */

import { themeColour } from './dom.mjs'
import { axisMarks, axisTime } from './figures.mjs'

export const COLOURS = { compute: '#4e79a7', communication: '#f28e2b', idle: '#9aa0a6' }
export const PARTS = Object.keys(COLOURS)
const LEFT = 86
const BOTTOM = 20
const TOP = 4

/** The height that so many rows ask for. */
export function rowsHeight(numRanks) {
  return TOP + BOTTOM + Math.max(1, numRanks) * Math.max(5, Math.min(26, 420 / Math.max(1, numRanks)))
}

/** Draw the ranks of a report between two times, in seconds; `scale`: pixels of the picture for one of the page. */
export function drawRows(canvas, ranks, [from_s, to_s], scale = globalThis.devicePixelRatio || 1) {
  const width = canvas.clientWidth || 600
  const height = canvas.clientHeight || rowsHeight(ranks.length)
  canvas.width = Math.round(width * scale)
  canvas.height = Math.round(height * scale)
  const brush = canvas.getContext('2d')
  brush.setTransform(scale, 0, 0, scale, 0, 0)
  brush.clearRect(0, 0, width, height)
  const text = themeColour(canvas, '--input-text', '#888')
  const row = (height - TOP - BOTTOM) / Math.max(1, ranks.length)
  const frame = { brush, from_s, to_s, left: LEFT, width: width - LEFT - 8, text }
  drawAxis(frame, height)
  ranks.forEach((rank, index) => {
    const y = TOP + index * row
    brush.fillStyle = text
    brush.font = '11px sans-serif'
    brush.textBaseline = 'middle'
    if (row >= 11 || index % Math.ceil(11 / row) === 0)
      brush.fillText(`${rank.rank}  ${rank.device}`, 4, y + row / 2, LEFT - 8)
    if (rank.begin) drawRank(frame, rank, y + row * 0.12, row * 0.76)
  })
}

/** The time at a place on the canvas, and the step there. */
export function timeAt(canvas, ranks, [from_s, to_s], clientX) {
  const box = canvas.getBoundingClientRect()
  const share = (clientX - box.left - LEFT) / (box.width - LEFT - 8)
  const at_s = from_s + Math.min(1, Math.max(0, share)) * (to_s - from_s)
  const timed = ranks.find((rank) => rank.begin)
  return { at_s, step: timed ? Math.max(0, lastAtMost(timed.begin, at_s)) : 0 }
}

/** What is drawn at a place: { rank, step, step_s, name, from_s, length_s }, without a name between two steps; null
    where no rank has a time. */
export function partAt(canvas, ranks, span, { clientX, clientY }) {
  const box = canvas.getBoundingClientRect()
  const row = (box.height - TOP - BOTTOM) / Math.max(1, ranks.length)
  const rank = ranks[Math.floor((clientY - box.top - TOP) / row)]
  if (!rank?.begin?.length || clientX < box.left + LEFT) return null
  const { at_s } = timeAt(canvas, [rank], span, clientX)
  const step = lastAtMost(rank.begin, at_s)
  if (step < 0) return null
  return { rank, step, step_s: total(rank, step), ...partOf(rank, step, at_s) }
}

function partOf(rank, step, at_s) {
  let from_s = rank.begin[step]
  for (const name of PARTS) {
    const length_s = rank[name][step]
    if (at_s < from_s + length_s) return { name, from_s, length_s }
    from_s += length_s
  }
  return {}
}

const ENOUGH = 3 // steps from which the first does not count: there a plan is proven, and others are tried

/** How the time of all ranks divides, as the server counts it; undefined where it was not measured. */
export function sharesOf(ranks) {
  const timed = ranks.filter((rank) => rank.begin)
  const counted = (times) => (times.length >= ENOUGH ? times.slice(1) : times)
  const sums = PARTS.map((name) => timed.reduce((sum, rank) => counted(rank[name]).reduce((a, b) => a + b, sum), 0))
  const whole = sums.reduce((a, b) => a + b, 0)
  return whole > 0 ? Object.fromEntries(PARTS.map((name, index) => [name, sums[index] / whole])) : undefined
}

/** When a step begins and ends, over all ranks. */
export function stepSpan(ranks, step) {
  const timed = ranks.filter((rank) => rank.begin && step < rank.begin.length)
  if (timed.length === 0) return [0, 1]
  const from = timed.reduce((least, rank) => Math.min(least, rank.begin[step]), Infinity)
  const to = timed.reduce((most, rank) => Math.max(most, rank.begin[step] + total(rank, step)), 0)
  return to > from ? [from, to] : [from, from + 1e-6]
}

function total(rank, step) {
  return rank.compute[step] + rank.communication[step] + rank.idle[step]
}

function drawAxis({ brush, from_s, to_s, left, width, text }, height) {
  brush.strokeStyle = text
  brush.fillStyle = text
  brush.globalAlpha = 0.7
  brush.font = '10px sans-serif'
  brush.textBaseline = 'alphabetic'
  const { apart, marks } = axisMarks(from_s, to_s, Math.max(2, Math.floor(width / 110)))
  for (const mark of marks) {
    const x = left + (width * (mark - from_s)) / (to_s - from_s)
    brush.globalAlpha = 0.15
    brush.fillRect(x, 0, 1, height - BOTTOM)
    brush.globalAlpha = 0.8
    brush.textAlign = x < left + 20 ? 'left' : x > left + width - 20 ? 'right' : 'center'
    brush.fillText(axisTime(mark, apart), x, height - 6)
  }
  brush.textAlign = 'left'
  brush.globalAlpha = 1
}

function drawRank(frame, rank, y, height) {
  const { from_s, to_s, width } = frame
  const pixels_a_s = width / (to_s - from_s)
  const first = Math.max(0, lastAtMost(rank.begin, from_s))
  const last = lastAtMost(rank.begin, to_s)
  if (last < first) return
  if (last - first + 1 > width / 2) return drawShares(frame, rank, [first, last], y, height)
  for (let step = first; step <= last; step++) {
    let at_s = rank.begin[step]
    for (const name of PARTS) {
      fill(frame, name, (at_s - from_s) * pixels_a_s, rank[name][step] * pixels_a_s, y, height)
      at_s += rank[name][step]
    }
  }
}

function drawShares(frame, rank, [first, last], y, height) {
  const columns = Math.max(1, Math.floor(frame.width / 2))
  const { from_s, to_s, width } = frame
  let step = first
  for (let column = 0; column < columns && step <= last; column++) {
    const end_s = from_s + ((to_s - from_s) * (column + 1)) / columns
    const sums = { compute: 0, communication: 0, idle: 0 }
    do {
      for (const name of Object.keys(sums)) sums[name] += rank[name][step]
      step++
    } while (step <= last && rank.begin[step] < end_s)
    const whole = sums.compute + sums.communication + sums.idle
    let top = y
    for (const [name, sum] of Object.entries(sums)) {
      const part = whole > 0 ? (height * sum) / whole : 0
      fill(frame, name, (width * column) / columns, width / columns, top, part)
      top += part
    }
  }
}

function fill({ brush, left, width }, name, x, length, y, height) {
  const start = Math.max(0, x)
  const end = Math.min(width, x + length)
  if (end <= start) return
  brush.fillStyle = COLOURS[name]
  brush.globalAlpha = name === 'idle' ? 0.35 : 1
  brush.fillRect(left + start, y, Math.max(0.5, end - start), height)
  brush.globalAlpha = 1
}

/** The last index whose value is at most `value`, -1 where none is. `values` grow. */
function lastAtMost(values, value) {
  let [low, high] = [0, values.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (values[middle] <= value) low = middle + 1
    else high = middle
  }
  return low - 1
}
