/* The bottom-panel tab: which run, its timeline, the charts beside it, and what can be taken away as a file. */

import { makeBenchmark, updateBenchmark } from './benchmark.mjs'
import { Charts } from './charts.mjs'
import { h, keyed, onThemeChange, setText, themeColour } from './dom.mjs'
import { COLOURS, drawRows, rowsHeight, stepSpan, timeAt } from './timeline_rows.mjs'
import { drawLinks } from './links.mjs'
import { chromeTrace, download, jsonBlob, openInPerfetto, pngOf } from './exports.mjs'
import { describeRun, readReport } from './report.mjs'
import { headline } from './sidebar.mjs'
import { inWords } from './words.mjs'

const ZOOM = 1.6

/**
 * Put the tab into `element`; `toast(severity, text)` tells the user something, `graph` is what it may do to the open
 * workflow: `usePlan(plan)` sets SP Config, `pictureOf(report)` finds a run's picture. Returns what takes it away.
 */
export function mountTimeline(element, store, t, toast, graph = {}) {
  const view = new TimelineView(store, t, toast, graph)
  element.replaceChildren(view.root)
  view.begin()
  return () => view.end()
}

class TimelineView {
  constructor(store, t, toast, graph) {
    Object.assign(this, {
      store,
      t,
      toast,
      graph,
      charts: new Charts(),
      report: readReport(null),
      chosen: null,
      span: [0, 1],
      ends: []
    })
    this._build()
  }

  begin() {
    this.ends.push(this.store.subscribe(() => this._storeChanged()))
    this.ends.push(onThemeChange(() => this._draw()))
    const observer = new ResizeObserver(() => this._drawRows())
    observer.observe(this.root)
    this.ends.push(() => observer.disconnect())
  }

  end() {
    this.ends.forEach((end) => end())
    this.charts.destroy()
    this.root.remove()
  }

  _build() {
    const { t } = this
    const button = (key, onclick) =>
      h('button', {
        type: 'button',
        class: 'pdit-button',
        'data-export': key,
        text: t(`timeline.${key}`),
        title: t(`timeline.tips.${key}`),
        onclick
      })
    this.pick = h('select', { 'aria-label': t('timeline.run'), onchange: () => this._choose(this.pick.value) })
    this.step = h('input', {
      type: 'number',
      min: 0,
      value: 0,
      'aria-label': t('timeline.step'),
      onchange: () => this._zoomToStep(Number(this.step.value))
    })
    this.file = h('input', { type: 'file', accept: 'application/json,.json', hidden: '', onchange: () => this._open() })
    this.note = h('p', { class: 'pdit-quiet', role: 'status', 'data-testid': 'pdit-timeline-note' })
    this.rows = h('canvas', {
      class: 'pdit-rows',
      tabindex: 0,
      role: 'img',
      'aria-label': t('timeline.keys'),
      'data-testid': 'pdit-rows',
      onwheel: (event) => this._wheel(event),
      onclick: (event) => this._click(event),
      onkeydown: (event) => this._key(event)
    })
    const chart = (name) =>
      h(
        'figure',
        { 'data-chart': name },
        h('figcaption', { text: t(`charts.${name}`) }),
        h('div', {}, h('canvas', { role: 'img', 'aria-label': t(`charts.${name}`) }))
      )
    this.figures = [chart('steps'), makeBenchmark(t, this.graph.usePlan), chart('memory')]
    this.matrix = h('table', {})
    const caption = t('charts.links')
    this.links = h(
      'figure',
      { 'data-chart': 'links', tabindex: 0, role: 'region', 'aria-label': caption }, // it scrolls: keys must reach it
      h('figcaption', { text: caption }),
      this.matrix
    )
    const legend = h(
      'span',
      { class: 'pdit-legend' },
      ...Object.entries(COLOURS).map(([name, colour]) =>
        h('span', {}, h('i', { style: `background:${colour}` }), t(`charts.${name}`))
      )
    )
    this.zoom = [
      button('fit', () => this._fit()),
      button('before', () => this._zoomToStep(Number(this.step.value) - 1)),
      this.step,
      button('after', () => this._zoomToStep(Number(this.step.value) + 1)),
      legend
    ]
    const tools = h(
      'div',
      { class: 'pdit-buttons', role: 'toolbar', 'aria-label': t('timeline.tools') },
      this.pick,
      ...this.zoom,
      h('span', { class: 'pdit-space' }),
      button('share', () => this._share()),
      button('png', () => this._png()),
      button('json', () => this._json()),
      button('trace', () => this._trace()),
      button('perfetto', () => this._perfetto()),
      button('open', () => this.file.click()),
      this.file
    )
    this.root = h(
      'div',
      { class: 'pdit pdit-timeline', 'data-testid': 'pdit-timeline' },
      tools,
      this.note,
      h('div', { class: 'pdit-main' }, h('div', { class: 'pdit-scroll' }, this.rows), this.figures[0], this.links),
      h('div', { class: 'pdit-side' }, ...this.figures.slice(1))
    )
  }

  _storeChanged() {
    const entries = (this.store.state?.reports ?? []).slice().reverse()
    const newest = entries.find((entry) => entry.kind !== 'vae' && entry.kind !== 'vae_decode') ?? entries[0]
    keyed(
      this.pick,
      entries,
      (entry) => entry.number,
      (entry) => h('option', { value: entry.number }),
      (option, entry) =>
        setText(option, this.t('timeline.entry', { number: entry.number, kind: this.t(`kinds.${entry.kind}`) }))
    )
    this.pick.hidden = entries.length === 0
    this._drawLinks()
    if (newest === undefined) {
      if (this.chosen !== 'file') this._show(readReport(null))
    } else if (newest.number !== this.newest) {
      this.newest = newest.number
      this.pick.value = String(newest.number)
      this._choose(newest.number)
    }
  }

  async _choose(number) {
    this.chosen = String(number)
    try {
      const raw = await this.store.report(Number(number))
      const benchmark = raw.kind === 'benchmark' ? undefined : this.store.newest('benchmark')
      this.benchmark = benchmark ? readReport(await this.store.report(benchmark.number)) : undefined
      if (this.chosen === String(number)) this._show(readReport(raw))
    } catch (error) {
      setText(this.note, String(error.message ?? error))
    }
  }

  async _open() {
    const [file] = this.file.files
    if (!file) return
    let raw = null
    try {
      raw = JSON.parse(await file.text())
    } catch {
      return this.toast('error', this.t('timeline.noJson', { name: file.name }))
    }
    this.chosen = 'file'
    this.benchmark = undefined
    this._show(readReport(Array.isArray(raw) ? raw[0] : raw))
  }

  async _show(report) {
    this.report = report
    const timed = report.ranks.find((rank) => rank.begin)
    this.step.max = timed ? timed.begin.length : 0
    this.step.value = 0
    const warnings = report.warnings?.length ? ` — ${report.warnings.map((text) => inWords(this.t, text)).join('; ')}` : ''
    setText(this.note, (report.problem ? this.t(report.problem) : headline(report, this.t)) + warnings)
    this.rows.hidden = timed === undefined
    this.zoom.forEach((tool) => (tool.hidden = timed === undefined))
    this.rows.style.height = `${rowsHeight(report.ranks.length)}px`
    this._drawLinks()
    this._fit()
    await this.charts.load()
    this._drawCharts()
  }

  _draw() {
    this._drawRows()
    this._drawCharts()
  }

  _drawRows() {
    if (this.rows.clientWidth === 0) return
    drawRows(this.rows, this.report.ranks, this.span)
    this.rows.dataset.drawn = `${this.report.ranks.length}x${this.report.steps.length}`
  }

  _drawCharts() {
    const { report, t } = this
    const [steps, speedups, memory] = this.figures
    this._chart(steps, report.steps.length > 0, (canvas) => this.charts.steps(canvas, report.steps, t))
    updateBenchmark(speedups, report, this.benchmark, this.charts, t)
    const held = report.memory.some((row) =>
      Object.keys(row).some((name) => name.endsWith('_bytes') && name !== 'memory_bytes')
    )
    this._chart(memory, held, (canvas) => this.charts.memory(canvas, report.memory, t))
  }

  _chart(figure, there, draw) {
    const canvas = figure.querySelector('canvas')
    figure.hidden = !there
    if (there && this.charts._Chart) draw(canvas)
    else this.charts.clear(canvas)
  }

  _drawLinks() {
    this.links.hidden = !drawLinks(this.matrix, this.report, this.store.state?.doctor, this.t)
  }

  _fit() {
    this.step.value = 0
    this._look([0, Math.max(this.report.end_s, 1e-6)])
  }

  _zoomToStep(number) {
    const most = Number(this.step.max)
    if (most === 0) return
    const step = Math.min(most, Math.max(0, Math.round(number) || 0))
    if (step === 0) return this._fit()
    this.step.value = step
    this._look(stepSpan(this.report.ranks, step - 1))
  }

  _look([from_s, to_s]) {
    const end_s = Math.max(this.report.end_s, 1e-6)
    const length = Math.min(end_s, Math.max(1e-6, to_s - from_s))
    const from = Math.min(Math.max(0, from_s), end_s - length)
    this.span = [from, from + length]
    this._drawRows()
  }

  _zoom(factor, centre_s) {
    const [from_s, to_s] = this.span
    const at_s = centre_s ?? (from_s + to_s) / 2
    this._look([at_s - (at_s - from_s) / factor, at_s + (to_s - at_s) / factor])
  }

  _wheel(event) {
    if (this.report.end_s === 0) return
    event.preventDefault()
    event.stopPropagation()
    this._zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, timeAt(this.rows, this.report.ranks, this.span, event.clientX).at_s)
  }

  _click(event) {
    this._zoomToStep(timeAt(this.rows, this.report.ranks, this.span, event.clientX).step + 1)
  }

  _key(event) {
    const length = this.span[1] - this.span[0]
    const does = {
      '+': () => this._zoom(ZOOM),
      '=': () => this._zoom(ZOOM),
      '-': () => this._zoom(1 / ZOOM),
      0: () => this._fit(),
      ArrowLeft: () => this._look(this.span.map((at) => at - length / 4)),
      ArrowRight: () => this._look(this.span.map((at) => at + length / 4)),
      Home: () => this._fit()
    }[event.key]
    if (!does) return
    event.preventDefault()
    event.stopPropagation()
    does()
  }

  get _name() {
    return `parallel-dit-${this.report.raw?.run_id?.slice(0, 8) ?? this.report.kind ?? 'report'}`
  }

  async _png() {
    const { report, t, figures } = this
    const parts = figures.map((figure) => [figure.firstChild.textContent, figure.querySelector('canvas')])
    const picture = pngOf({
      title: t('timelineTitle'),
      lines: [describeRun(report, t), headline(report, t), t('timeline.order')],
      legend: Object.entries(COLOURS).map(([name, colour]) => [t(`charts.${name}`), colour]),
      parts: [['', this.rows], ...parts],
      background: themeColour(this.root, '--comfy-menu-bg', '#222'),
      text: themeColour(this.root, '--input-text', '#ddd')
    })
    download(`${this._name}.png`, await picture)
  }

  async _share() {
    if (!this._hasReport()) return
    const entry = this.store.state?.reports?.find((each) => String(each.number) === this.chosen)
    const { openShareCard } = await import('./share_card.mjs')
    await openShareCard({ ...this, speedup: entry?.summary?.speedup, name: this._name })
  }

  _json() {
    if (this._hasReport()) download(`${this._name}.json`, jsonBlob(this.report.raw))
  }

  _trace() {
    if (this._hasReport()) download(`${this._name}.trace.json`, jsonBlob(chromeTrace(this.report)))
  }

  _perfetto() {
    if (this._hasReport() && !openInPerfetto(chromeTrace(this.report), this._name))
      this.toast('warn', this.t('timeline.blocked'))
  }

  _hasReport() {
    if (this.report.raw) return true
    this.toast('info', this.t('report.none'))
    return false
  }
}
