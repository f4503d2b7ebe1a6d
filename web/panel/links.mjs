/* The link matrix: which ranks exchange over which axis and link, what each sent and how long it waited.

   Bytes are counted and waiting is measured for each rank, not for each pair, so they stand beside the matrix. */

import { h } from './dom.mjs'
import { bytes, seconds } from './figures.mjs'
import { axisBetween } from './mesh.mjs'

const MOST_COLUMNS = 16 // more ranks have rows alone
const FIGURES = ['sent', 'waited', 'rate']

/** Fill `table` from a report and what the doctor found; returns whether there is anything to show. */
export function drawLinks(table, report, doctor, t) {
  const peers = doctor?.peer_access ?? {}
  const devices = report.traffic.length ? report.traffic.map((rank) => rank.device) : devicesOf(peers)
  const drawn = JSON.stringify([report.traffic, report.plan, devices, peers])
  if (table.dataset.drawn !== drawn) {
    table.dataset.drawn = drawn
    table.replaceChildren(...rows(report, devices, peers, t))
  }
  return devices.length > 1
}

function devicesOf(peers) {
  return [...new Set(Object.keys(peers).flatMap((pair) => pair.split('-')))]
}

function rows(report, devices, peers, t) {
  const others = devices.length <= MOST_COLUMNS ? devices : []
  const figures = report.traffic.length ? FIGURES : []
  const head = h(
    'tr',
    {},
    h('th', {}),
    ...figures.map((name) =>
      h('th', { scope: 'col', 'data-figure': name, title: t(`links.tips.${name}`), text: t(`links.${name}`) })
    ),
    ...others.map((device, rank) => h('th', { scope: 'col', title: device, text: String(rank) }))
  )
  const body = devices.map((device, rank) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row', text: `${rank} ${device}` }),
      ...figures.map((name) => h('td', { 'data-figure': name, text: figureText(name, report.traffic[rank], t) })),
      ...others.map((_, other) => cell(rank, other, report, devices, peers, t))
    )
  )
  return [head, ...body]
}

function cell(a, b, report, devices, peers, t) {
  if (a === b) return h('td', { text: '–' })
  const reached = peers[`${devices[a]}-${devices[b]}`]
  const link = reached === undefined ? null : reached ? 'direct' : 'host'
  const axis = report.traffic.length && report.plan ? axisBetween(report.plan, a, b) : ''
  const words = [axis && t(`axes.${axis}`), link && t(`links.${link}`)].filter(Boolean)
  return h('td', { 'data-link': link, 'data-axis': axis || null, text: words.join(', ') })
}

function figureText(name, rank, t) {
  const text = {
    sent: Number.isFinite(rank.sent_bytes) ? bytes(rank.sent_bytes) : null,
    waited: Number.isFinite(rank.waited_s) ? seconds(rank.waited_s) : null,
    rate: Number.isFinite(rank.rate) ? `${bytes(rank.rate)}/s` : null
  }[name]
  return text ?? t('links.unknown')
}
