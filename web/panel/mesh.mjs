/* The plan as a picture: a box a lane, its ranks in rows (ring) and columns (ulysses), and who sends to whom. */

import { h } from './dom.mjs'

const AXES = ['data', 'cfg', 'pipefusion', 'ring', 'ulysses']
const CELL = 34
const PAD = 12

/** The degrees of a plan; 1 for every axis that is not a whole number from 1 on. */
export function degreesOf(plan) {
  const given = plan?.degrees ?? plan ?? {}
  return Object.fromEntries(
    AXES.map((axis) => [axis, Number.isInteger(given[axis]) && given[axis] > 0 ? given[axis] : 1])
  )
}

/** An SVG of the plan over so many ranks. Ranks beyond the plan are drawn apart, without links. */
export function drawMesh(plan, numRanks, t) {
  const degrees = degreesOf(plan)
  const needed = AXES.reduce((product, axis) => product * degrees[axis], 1)
  const lanes = degrees.data * degrees.cfg
  const rows = degrees.pipefusion * degrees.ring
  const box = { width: degrees.ulysses * CELL + PAD, height: rows * CELL + PAD }
  const spare = Math.max(0, numRanks - needed)
  const perRow = Math.max(1, Math.min(lanes, Math.floor(300 / (box.width + PAD))))
  const width = Math.max(perRow * (box.width + PAD), Math.min(spare, 8) * CELL) + PAD
  const height = Math.ceil(lanes / perRow) * (box.height + PAD) + PAD + Math.ceil(spare / 8) * CELL
  const label = AXES.filter((axis) => degrees[axis] > 1).map((axis) => `${t(`axes.${axis}`)} ${degrees[axis]}`)
  const svg = h('svg', {
    viewBox: `0 0 ${width} ${height}`,
    class: 'pdit-mesh',
    role: 'img',
    'aria-label': label.join(' × ') || t('panel.oneRank'),
    style: `max-width:${width}px`
  })
  for (let lane = 0; lane < lanes; lane++) {
    const x = PAD + (lane % perRow) * (box.width + PAD)
    const y = PAD + Math.floor(lane / perRow) * (box.height + PAD)
    svg.append(drawLane(lane, { x, y, ...box }, degrees, t))
  }
  for (let rank = needed; rank < numRanks; rank++) {
    const index = rank - needed
    svg.append(
      dot(
        PAD + (index % 8) * CELL + CELL / 2,
        height - CELL * (Math.ceil(spare / 8) - Math.floor(index / 8)) + CELL / 2 - PAD / 2,
        rank,
        true
      )
    )
  }
  return svg
}

function drawLane(lane, box, degrees, t) {
  const stages = degrees.pipefusion
  const rows = stages * degrees.ring
  const group = h(
    'g',
    {},
    h('rect', { x: box.x, y: box.y, width: box.width, height: box.height, rx: 8, class: 'pdit-lane' })
  )
  const title = []
  if (degrees.data > 1) title.push(`${t('axes.data')} ${Math.floor(lane / degrees.cfg)}`)
  if (degrees.cfg > 1) title.push(`${t('axes.cfg')} ${lane % degrees.cfg}`)
  if (title.length) group.append(h('title', { text: title.join(', ') }))
  const at = (row, column) => [box.x + PAD / 2 + column * CELL + CELL / 2, box.y + PAD / 2 + row * CELL + CELL / 2]
  for (let row = 0; row < rows; row++) {
    if (degrees.ulysses > 1) {
      const [[x1, y], [x2]] = [at(row, 0), at(row, degrees.ulysses - 1)]
      group.append(h('line', { x1, y1: y, x2, y2: y, class: 'pdit-ulysses' }))
    }
  }
  for (let column = 0; column < degrees.ulysses; column++) {
    for (let stage = 0; stage < stages; stage++) {
      const [top, bottom] = [stage * degrees.ring, (stage + 1) * degrees.ring - 1]
      if (degrees.ring > 1) group.append(ringPath(at(top, column), at(bottom, column)))
      if (stage > 0) {
        const [[x1, y1], [x2, y2]] = [at(top - 1, column), at(top, column)]
        group.append(h('line', { x1, y1, x2, y2, class: 'pdit-pipe' }))
      }
    }
  }
  const first = lane * rows * degrees.ulysses
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < degrees.ulysses; column++)
      group.append(dot(...at(row, column), first + row * degrees.ulysses + column, false))
  return group
}

function ringPath([x, top], [, bottom]) {
  const bend = x - CELL * 0.42
  return h('path', {
    d: `M${x} ${top} L${x} ${bottom} C${bend} ${bottom} ${bend} ${top} ${x} ${top}`,
    class: 'pdit-ring'
  })
}

function dot(x, y, rank, spare) {
  return h(
    'g',
    { class: spare ? 'pdit-spare' : 'pdit-rank', 'data-rank': rank },
    h('circle', { cx: x, cy: y, r: 11 }),
    h('text', { x, y: y + 4, 'text-anchor': 'middle', text: String(rank) })
  )
}
