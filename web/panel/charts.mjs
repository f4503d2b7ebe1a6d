/* The charts beside the timeline, by Chart.js, which is loaded when the first of them is drawn. */

import { themeColour } from './dom.mjs'
import { bytes, seconds, times } from './figures.mjs'

const MOST_POINTS = 600
const BAR = { compute: '#4e79a7', good: '#59a14f', bad: '#e15759', other: '#76b7b2', spare: '#bab0ac' }

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

  /** How many times faster than one rank each case is. */
  speedups(canvas, rows, t) {
    const measured = rows.filter((row) => Number.isFinite(row.speedup))
    this._draw(
      canvas,
      'bar',
      {
        labels: measured.map((row) => row.name),
        datasets: [
          {
            label: t('charts.speedup'),
            data: measured.map((row) => row.speedup),
            backgroundColor: measured.map((row) => (row.speedup >= 1 ? BAR.good : BAR.bad))
          }
        ]
      },
      { y: { format: times, zero: true } }
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
    const scale = ({ type: kind, title, format, zero } = {}) => ({
      ...(kind ? { type: kind } : {}),
      beginAtZero: zero === true,
      grace: zero ? '5%' : 0, // the highest bar stands clear of the frame
      title: { display: title !== undefined, text: title, color: colour },
      ticks: {
        color: colour,
        maxTicksLimit: 8,
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
      this._charts.set(canvas, new this._Chart(canvas, { type, data, options }))
    }
  }
}
