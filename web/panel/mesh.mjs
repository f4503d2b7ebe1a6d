/* The plan as a picture: a box a group, its ranks in rows (stages, ring) and columns (ulysses), and who sends to whom. */

import { h } from './dom.mjs'

/** The degrees of a plan. */
export const AXES = ['data', 'cfg', 'pipefusion', 'ring', 'ulysses'] // from the outermost to the innermost
const CELL = 34
const PAD = 12
const LINE = 12 // a line of a group's name
const WIDEST = 300
const BEND = 22 // how far the way back around a ring leans out; less than the next column is away

/** The degrees of a plan; 1 for every axis that is not a whole number from 1 on. */
function degreesOf(plan) {
  const given = plan?.degrees ?? plan ?? {}
  return Object.fromEntries(
    AXES.map((axis) => [axis, Number.isInteger(given[axis]) && given[axis] > 0 ? given[axis] : 1])
  )
}

/** How many ranks a plan takes. */
export function ranksOf(plan) {
  return Object.values(degreesOf(plan)).reduce((product, degree) => product * degree, 1)
}

/** The axis over which two ranks exchange under a plan; '' when they do not: replicas and sleeping ranks never do.
    Counts as ParallelPlan.coordinates does, since a plan that is being edited has no report yet; a test holds it to that. */
export function axisBetween(plan, a, b) {
  const degrees = degreesOf(plan)
  if (Math.max(a, b) >= ranksOf(plan)) return ''
  const differ = []
  for (const axis of [...AXES].reverse()) {
    if (a % degrees[axis] !== b % degrees[axis]) differ.push(axis)
    a = Math.floor(a / degrees[axis])
    b = Math.floor(b / degrees[axis])
  }
  return differ.length === 1 && differ[0] !== 'data' ? differ[0] : ''
}

/** An SVG of the plan over so many ranks. Ranks beyond the plan are drawn apart, without links. */
export function drawMesh(plan, numRanks, t) {
  const degrees = degreesOf(plan)
  const needed = ranksOf(plan)
  const place = placesOf(degrees, Math.max(0, numRanks - needed))
  const label = AXES.filter((axis) => degrees[axis] > 1).map((axis) => `${t(`axes.${axis}`)} ${degrees[axis]}`)
  const svg = h('svg', {
    viewBox: `0 0 ${place.width} ${place.height}`,
    class: 'pdit-mesh',
    role: 'img',
    'aria-label': label.join(' × ') || t('panel.oneRank'),
    style: `max-width:${place.width}px`
  })
  for (let group = 0; group < place.groups; group++) {
    svg.append(drawGroup(group, place.group(group), degrees, t))
    if (group % degrees.cfg > 0) svg.append(...cfgLink(place.group(group - 1), place.group(group)))
  }
  for (let rank = needed; rank < numRanks; rank++) svg.append(dot(...place.spare(rank - needed), rank, true))
  return svg
}

/** Which line of the picture is which axis, for those that the plan has. */
export function meshKeys(plan, t) {
  const degrees = degreesOf(plan)
  const keys = AXES.filter((axis) => degrees[axis] > 1)
  return h(
    'p',
    { class: 'pdit-keys' },
    ...keys.map((axis) => h('span', { 'data-axis': axis }, h('i', {}), `${t(`axes.${axis}`)} ${degrees[axis]}`))
  )
}

/* Where the groups and the sleeping ranks stand, and how large that is. Groups of one image stand side by side. */
function placesOf(degrees, spare) {
  const groups = degrees.data * degrees.cfg
  const names = (degrees.data > 1 ? 1 : 0) + (degrees.cfg > 1 ? 1 : 0)
  const box = {
    width: degrees.ulysses * CELL + PAD,
    height: degrees.pipefusion * degrees.ring * CELL + PAD + names * LINE
  }
  const fitting = Math.max(1, Math.min(groups, Math.floor(WIDEST / (box.width + PAD))))
  const perRow = fitting > degrees.cfg ? fitting - (fitting % degrees.cfg) : fitting
  const below = Math.ceil(groups / perRow) * (box.height + PAD) + PAD
  return {
    groups,
    width: Math.max(perRow * (box.width + PAD), Math.min(spare, 8) * CELL) + PAD,
    height: below + Math.ceil(spare / 8) * CELL,
    group: (group) => ({
      x: PAD + (group % perRow) * (box.width + PAD),
      y: PAD + Math.floor(group / perRow) * (box.height + PAD),
      top: names * LINE,
      ...box
    }),
    spare: (index) => [PAD + (index % 8) * CELL + CELL / 2, below + Math.floor(index / 8) * CELL + CELL / 2 - PAD / 2]
  }
}

function drawGroup(index, box, degrees, t) {
  const rows = degrees.pipefusion * degrees.ring
  const group = h(
    'g',
    {},
    h('rect', { x: box.x, y: box.y, width: box.width, height: box.height, rx: 8, class: 'pdit-group' })
  )
  const names = []
  if (degrees.data > 1) names.push(`${t('axes.data')} ${Math.floor(index / degrees.cfg)}`)
  if (degrees.cfg > 1) names.push(`${t('axes.cfg')} ${index % degrees.cfg}`)
  names.forEach((text, line) =>
    group.append(
      h('text', {
        x: box.x + box.width / 2,
        y: box.y + (line + 1) * LINE,
        'text-anchor': 'middle',
        class: 'pdit-name',
        text
      })
    )
  )
  const at = (row, column) => [
    box.x + PAD / 2 + column * CELL + CELL / 2,
    box.y + box.top + PAD / 2 + row * CELL + CELL / 2
  ]
  group.append(...linesOf(degrees, at))
  const first = index * rows * degrees.ulysses
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < degrees.ulysses; column++)
      group.append(dot(...at(row, column), first + row * degrees.ulysses + column, false))
  return group
}

/* The links inside a group: ulysses along its rows, rings and then stages along its columns. */
function linesOf(degrees, at) {
  const found = []
  for (let row = 0; row < degrees.pipefusion * degrees.ring; row++)
    if (degrees.ulysses > 1) found.push(line(at(row, 0), at(row, degrees.ulysses - 1), 'ulysses'))
  for (let column = 0; column < degrees.ulysses; column++)
    for (let stage = 0; stage < degrees.pipefusion; stage++) {
      const [top, bottom] = [stage * degrees.ring, (stage + 1) * degrees.ring - 1]
      if (degrees.ring > 1) found.push(ringPath(at(top, column), at(bottom, column)))
      if (stage > 0) found.push(line(at(top - 1, column), at(top, column), 'pipefusion'))
    }
  return found
}

/* Two groups of one image exchange what they made of it; where they stand below each other, their names say it. */
function cfgLink(left, right) {
  if (left.y !== right.y) return []
  const y = left.y + left.top + (left.height - left.top) / 2
  return [line([left.x + left.width, y], [right.x, y], 'cfg')]
}

function line([x1, y1], [x2, y2], axis) {
  return h('line', { x1, y1, x2, y2, 'data-axis': axis })
}

function ringPath([x, top], [, bottom]) {
  const bend = x - BEND
  return h('path', {
    d: `M${x} ${top} L${x} ${bottom} C${bend} ${bottom} ${bend} ${top} ${x} ${top}`,
    'data-axis': 'ring'
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
