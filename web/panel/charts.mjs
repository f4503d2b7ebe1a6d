/* The charts beside the timeline, by Chart.js, which is loaded when the first of them is drawn. */

import { themeColour } from './dom.mjs'
import { bytes, largest, seconds, times } from './figures.mjs'

const MOST_POINTS = 600
const BAR = { compute: '#4e79a7', good: '#59a14f', bad: '#e15759', other: '#76b7b2', spare: '#bab0ac' }
const [TEXT_GAP, DIGIT] = [5, 6.5] // pixels before a bar's text, and of each of its characters

/* The values at the ends of bars that have texts. */
const VALUES = {
  id: 'values',
  afterDatasetsDraw(chart) {
    const { ctx, canvas } = chart
    const texts = chart.data.datasets[0]?.texts
    if (!texts) return
    ctx.save()
    ctx.fillStyle = themeColour(canvas, '--input-text', '#888')
    ctx.font = '11px sans-serif'
    ctx.textBaseline = 'middle'
    chart.getDatasetMeta(0).data.forEach((bar, at) => ctx.fillText(texts[at], bar.x + TEXT_GAP, bar.y))
    ctx.restore()
  }
}

/** What draws and updates charts; `load` is called before anything else. */
export class Charts {
  constructor() {
    this._charts = new Map()
  }

  async load() {
    if (!this._Chart) this._Chart = (await import('../vendor/chart.mjs')).Chart
  }

  /** Seconds of each step, of many steps the slowest of each few. */
  steps(canvas, steps, t) {
    const every = Math.max(1, Math.ceil(steps.length / MOST_POINTS))
    const points = []
    for (let at = 0; at < steps.length; at += every)
      points.push({ x: at + 1, y: Math.max(...steps.slice(at, at + every)) })
    this._draw(
      canvas,
      'line',
      {
        datasets: [
          {
            label: t('charts.step'),
            data: points,
            borderColor: BAR.compute,
            backgroundColor: BAR.compute,
            borderWidth: 1.5,
            pointRadius: points.length > 60 ? 0 : 2
          }
        ]
      },
      { x: { type: 'linear', title: t('charts.stepNumber') }, y: { format: seconds, zero: true } }
    )
  }

  /** Whether `load` has ended. */
  get loaded() {
    return this._Chart !== undefined
  }

  /** What is printed at the end of a bar. */
  barText(row) {
    return `${row.name}: ${times(row.factor)}, ${seconds(row.median_s)}`
  }

  /** How many times as fast as the base each case is: bars from the left, with their values. */
  speedups(canvas, rows, t) {
    this._draw(
      canvas,
      'bar',
      {
        labels: rows.map((row) => row.name),
        datasets: [
          {
            label: t('charts.speedup'),
            data: rows.map((row) => row.factor),
            texts: rows.map((row) => `${times(row.factor)}  ${seconds(row.median_s)}`),
            barThickness: 14,
            backgroundColor: rows.map((row) =>
              row.kind !== 'plan' ? BAR.compute : row.factor >= 1 ? BAR.good : BAR.bad
            )
          }
        ]
      },
      { x: { format: (factor) => `${factor}×`, zero: true }, y: {}, across: true }
    )
  }

  /** Memory of each rank, as far as it was measured. */
  memory(canvas, rows, t) {
    const names = ['allocated_bytes', 'reserved_bytes', 'resident_bytes'].filter((name) =>
      rows.some((row) => Number.isFinite(row[name]))
    )
    const colours = [BAR.compute, BAR.other, BAR.spare]
    this._draw(
      canvas,
      'bar',
      {
        labels: rows.map((row) => `${row.rank} ${row.device}`),
        datasets: names.map((name, index) => ({
          label: t(`charts.${name}`),
          data: rows.map((row) => row[name] ?? null),
          backgroundColor: colours[index]
        }))
      },
      { y: { format: bytes, zero: true } }
    )
  }

  /** Take the chart of a canvas away. */
  clear(canvas) {
    this._charts.get(canvas)?.destroy()
    this._charts.delete(canvas)
  }

  /** Take all away. */
  destroy() {
    this._charts.forEach((chart) => chart.destroy())
    this._charts.clear()
  }

  _draw(canvas, type, data, axes) {
    const colour = themeColour(canvas, '--input-text', '#888')
    const texts = data.datasets[0]?.texts ?? []
    const scale = ({ type: kind, title, format, zero } = {}) => ({
      ...(kind ? { type: kind } : {}),
      beginAtZero: zero === true,
      grace: zero ? '5%' : 0, // the longest bar stands clear of the frame
      title: { display: title !== undefined, text: title, color: colour },
      ticks: {
        color: colour,
        maxTicksLimit: axes.across && !zero ? undefined : 8,
        autoSkip: !axes.across,
        ...(kind ? { precision: 0 } : {}),
        font: { size: 10 },
        ...(format ? { callback: (value) => format(Number(value)) } : {})
      },
      grid: { color: 'rgba(128,128,128,0.2)' }
    })
    const options = {
      responsive: true,
      maintainAspectRatio: false,
      animation: false,
      normalized: true,
      indexAxis: axes.across ? 'y' : 'x',
      layout: { padding: { right: texts.length && TEXT_GAP + largest(texts.map((text) => text.length)) * DIGIT } },
      plugins: {
        legend: { display: data.datasets.length > 1, labels: { color: colour, boxWidth: 10, font: { size: 10 } } }
      },
      scales: { x: scale(axes.x), y: scale(axes.y) }
    }
    const old = this._charts.get(canvas)
    if (old && old.config.type === type) {
      Object.assign(old, { data, options })
      old.update('none')
    } else {
      old?.destroy()
      this._charts.set(canvas, new this._Chart(canvas, { type, data, options, plugins: [VALUES] }))
    }
  }
}
