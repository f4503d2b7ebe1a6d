/* The bottom-panel tab: which run, its timeline, the charts beside it, and what can be taken away as a file. */

import { makeBenchmark, updateBenchmark } from './benchmark.mjs'
import { Charts } from './charts.mjs'
import { h, keyed, onThemeChange, setText, themeColour } from './dom.mjs'
import { percent, ratio, seconds } from './figures.mjs'
import { COLOURS, PARTS, drawRows, partAt, rowsHeight, sharesOf, stepSpan, timeAt } from './timeline_rows.mjs'
import { drawLinks } from './links.mjs'
import { chromeTrace, download, jsonBlob, openInPerfetto, pngOf } from './exports.mjs'
import { describeRun, readReport, sameWork } from './report.mjs'
import { headline } from './sidebar.mjs'
import { heroText, planName, quoteText, runName, suggestionText, verdictText } from './told.mjs'
import { inWords } from './words.mjs'

const ZOOM = 1.6
const NARROW = 820 // pixels, below which all stands in one column
const TOLD_RANKS = 8 // of a step's, in its details

/**
 * Put the tab into `element`. `services.toast(severity, text)` tells the user something, `services.templates()` opens
 * ComfyUI's; `services.usePlan(plan)` sets SP Config, `services.pictureOf(report)` finds a run's picture. Returns what
 * takes it away.
 */
export function mountTimeline(element, store, t, services) {
  const view = new TimelineView(store, t, services)
  element.replaceChildren(view.root)
  view.begin()
  return () => view.end()
}

class TimelineView {
  constructor(store, t, { toast, templates, ...graph }) {
    Object.assign(this, {
      store,
      t,
      toast,
      templates,
      graph,
      charts: new Charts(),
      report: readReport(null),
      other: null,
      chosen: null,
      span: [0, 1],
      ends: []
    })
    this._build()
  }

  begin() {
    this.ends.push(this.store.subscribe(() => this._storeChanged()))
    this.ends.push(onThemeChange(() => this._draw()))
    const observer = new ResizeObserver(() => {
      this.root.toggleAttribute('data-narrow', this.root.clientWidth < NARROW)
      this._drawRows()
    })
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
    this.beside = h('select', { 'aria-label': t('timeline.beside'), onchange: () => this._compare(this.beside.value) })
    this.file = h('input', { type: 'file', accept: 'application/json,.json', hidden: '', onchange: () => this._open() })
    this.note = h('p', { class: 'pdit-quiet', role: 'status', 'data-testid': 'pdit-timeline-note' })
    this.rows = this._canvas('pdit-rows', () => this.report, { tabindex: 0, 'aria-label': t('timeline.keys') })
    this.rows.addEventListener('keydown', (event) => this._key(event))
    this.otherRows = this._canvas('pdit-rows-other', () => this.other, { 'aria-label': t('timeline.beside') })
    this.names = [h('figcaption', {}), h('figcaption', {})]
    this.tip = h('div', { class: 'pdit-tip', 'data-testid': 'pdit-tip', hidden: '', 'aria-hidden': 'true' })
    this.scroll = h(
      'div',
      { class: 'pdit-scroll' },
      this.names[0],
      this.rows,
      h('div', { hidden: '' }, this.names[1], this.otherRows),
      this.tip
    )
    this.details = h('p', { class: 'pdit-details', role: 'status', 'data-testid': 'pdit-details' })
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
    this.keys = Object.fromEntries(PARTS.map((name) => [name, h('span', {})]))
    this.legend = h(
      'p',
      { class: 'pdit-legend', 'data-testid': 'pdit-legend' },
      ...PARTS.map((name) => h('span', {}, h('i', { style: `background:${COLOURS[name]}` }), this.keys[name])),
      h('span', { class: 'pdit-quiet', text: t('timeline.order') })
    )
    this.zoom = [
      button('fit', () => this._fit()),
      button('before', () => this._zoomToStep(Number(this.step.value) - 1)),
      this.step,
      button('after', () => this._zoomToStep(Number(this.step.value) + 1))
    ]
    this.exports = [
      button('share', () => this._share()),
      button('png', () => this._png()),
      button('json', () => this._json()),
      button('trace', () => this._trace()),
      button('perfetto', () => this._perfetto())
    ]
    const tools = h(
      'div',
      { class: 'pdit-buttons', role: 'toolbar', 'aria-label': t('timeline.tools') },
      h('span', { class: 'pdit-buttons' }, this.pick, this.beside, ...this.zoom),
      h('span', { class: 'pdit-space' }),
      h('span', { class: 'pdit-buttons' }, ...this.exports, button('open', () => this.file.click()), this.file)
    )
    this.empty = h(
      'div',
      { class: 'pdit-empty', 'data-testid': 'pdit-empty' },
      h('p', { text: t('timeline.empty') }),
      h('button', { type: 'button', class: 'pdit-button', text: t('timeline.templates'), onclick: this.templates })
    )
    this.root = h(
      'div',
      { class: 'pdit pdit-timeline', 'data-testid': 'pdit-timeline' },
      tools,
      this.note,
      this.legend,
      h('div', { class: 'pdit-main' }, this.scroll, this.details, this.figures[0], this.links),
      h('div', { class: 'pdit-side' }, ...this.figures.slice(1))
    )
  }

  /* A canvas with the rows of a report, which `report()` gives. */
  _canvas(name, report, more) {
    return h('canvas', {
      class: 'pdit-rows',
      role: 'img',
      'data-testid': name,
      onwheel: (event) => this._wheel(event),
      onclick: (event) => this._click(event, report()),
      ondblclick: (event) => this._zoomToStep(this._at(event, report()).step + 1),
      onpointermove: (event) => this._hover(event, report()),
      onpointerleave: () => (this.tip.hidden = true),
      ...more
    })
  }

  _storeChanged() {
    const session = this.store.state?.session
    if (session !== this.session) {
      Object.assign(this, { session, newest: undefined }) // another server, whose numbers begin anew
      if (this.otherNumber) this._compare(0)
    }
    const decodes = ['vae', 'vae_decode']
    const entries = (this.store.state?.reports ?? []).filter((entry) => !decodes.includes(entry.kind)).reverse()
    const newest = entries.find((entry) => !entry.reference) ?? entries[0]
    const options = (select, wanted) =>
      keyed(
        select,
        wanted,
        (entry) => entry.number,
        (entry) => h('option', { value: entry.number }),
        (option, entry) => setText(option, entry.number ? runName(entry, this.t) : this.t('timeline.alone'))
      )
    options(this.pick, entries)
    options(this.beside, [{ number: 0 }, ...entries.filter((entry) => entry.kind !== 'benchmark')])
    if (this.otherNumber && !entries.some((entry) => entry.number === this.otherNumber)) this._compare(0)
    this.pick.hidden = this.beside.hidden = entries.length === 0
    this._drawLinks()
    this._tellRun()
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

  /** Draw another run under this one, on the same time; 0 for none. */
  async _compare(number) {
    this.otherNumber = Number(number)
    this.beside.value = String(this.otherNumber)
    let other = null
    try {
      if (this.otherNumber) other = readReport(await this.store.report(this.otherNumber))
    } catch (error) {
      this.toast('warn', String(error.message ?? error))
    }
    if (this.otherNumber !== Number(number)) return
    this.other = other
    this.otherRows.parentElement.hidden = other === null
    this.otherRows.style.height = `${rowsHeight(other?.ranks.length ?? 1)}px`
    this._tellRun()
    this._fit()
  }

  get _entry() {
    return this.store.state?.reports?.find((entry) => String(entry.number) === this.chosen)
  }

  /* The line under the tools, and what stands over the rows. */
  _tellRun() {
    const { report, t } = this
    const summary = this._entry?.summary
    const warnings = report.warnings?.length ? ` — ${report.warnings.map((text) => inWords(t, text)).join('; ')}` : ''
    const hero = heroText(summary, t)
    const verdict = [verdictText(summary, t), suggestionText(summary, t)].filter(Boolean).join(' ')
    const told = report.problem ? t(report.problem) : [hero, headline(report, t), verdict].filter(Boolean).join(' · ')
    setText(this.note, report.raw === null ? '' : told + warnings)
    const shares = sharesOf(report.ranks)
    for (const name of PARTS)
      setText(this.keys[name], shares ? `${t(`charts.${name}`)} ${percent(shares[name])}` : t(`charts.${name}`))
    const [first, second] = this.other ? [this._named(report), this._named(this.other)] : ['', '']
    setText(this.names[0], first)
    setText(this.names[1], second && `${second} — ${this._compared()}`)
  }

  _named(report) {
    const entry = this.store.state?.reports?.find((each) => this.store.known(each.number) === report.raw)
    return entry ? runName(entry, this.t) : planName({ plan: report.plan?.name, ranks: report.plan?.ranks }, this.t)
  }

  /* How the two runs compare, if they sampled the same. */
  _compared() {
    const [a, b] = [this.report, this.other]
    const factor = b.headline?.step_s / a.headline?.step_s
    const same = factor > 0 && Number.isFinite(factor) ? sameWork(a, b) : undefined
    if (!same) return this.t(same === false ? 'timeline.unlike' : 'timeline.unknown')
    const key = factor >= 1 ? 'timeline.firstFaster' : 'timeline.secondFaster'
    return this.t(key, { factor: ratio(Math.max(factor, 1 / factor)) })
  }

  async _open() {
    const [file] = this.file.files
    if (!file) return
    this.file.value = '' // so that the same file can be chosen again
    let raw = null
    try {
      raw = JSON.parse(await file.text())
    } catch {
      return this.toast('error', this.t('timeline.noJson', { name: file.name }))
    }
    this.chosen = 'file'
    this.pick.value = '' // so that any run can be chosen again
    this.benchmark = undefined
    this._show(readReport(Array.isArray(raw) ? raw[0] : raw))
  }

  async _show(report) {
    this.report = report
    if (report.raw === null && this.root.contains(this.legend)) this.legend.before(this.empty)
    else if (report.raw !== null) this.empty.remove()
    this.legend.hidden = !report.ranks.some((rank) => rank.begin)
    this.exports.forEach((button) => (button.disabled = report.raw === null))
    setText(this.details, '')
    const timed = report.ranks.find((rank) => rank.begin)
    this.step.max = timed ? timed.begin.length : 0
    this.step.value = 0
    this._tellRun()
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
    if (this.other) drawRows(this.otherRows, this.other.ranks, this.span)
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

  get _end_s() {
    return Math.max(this.report.end_s, this.other?.end_s ?? 0, 1e-6)
  }

  _fit() {
    this._look([0, this._end_s])
  }

  _zoomToStep(number) {
    const most = Number(this.step.max)
    if (most === 0) return
    const step = Math.min(most, Math.max(0, Math.round(number) || 0))
    setText(this.details, step === 0 ? '' : this._toldStep(step - 1))
    if (step === 0) return this._fit()
    this._look(stepSpan(this.report.ranks, step - 1), step)
  }

  /* Show this part of the time; the field follows, to the step in the middle where none is given. */
  _look([from_s, to_s], step) {
    const end_s = this._end_s
    const length = Math.min(end_s, Math.max(1e-6, to_s - from_s))
    const from = Math.min(Math.max(0, from_s), end_s - length)
    this.span = [from, from + length]
    const middle = this.rows.getBoundingClientRect()
    const whole = length >= end_s * 0.999
    const there = { clientX: middle.left + (middle.width + 78) / 2 } // half way along the time
    this.step.value = whole ? 0 : (step ?? this._at(there, this.report).step + 1)
    this._drawRows()
  }

  _zoom(factor, centre_s) {
    const [from_s, to_s] = this.span
    const at_s = centre_s ?? (from_s + to_s) / 2
    this._look([at_s - (at_s - from_s) / factor, at_s + (to_s - at_s) / factor])
  }

  _at(event, report) {
    return timeAt(this.rows, report.ranks, this.span, event.clientX)
  }

  /* The wheel scrolls the panel; sideways it moves along the time, and with ctrl it zooms. */
  _wheel(event) {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX
    const zooms = event.ctrlKey || event.metaKey
    event.stopPropagation()
    if (!zooms && Math.abs(sideways) <= Math.abs(event.shiftKey ? 0 : event.deltaY)) return
    event.preventDefault()
    const length = this.span[1] - this.span[0]
    if (zooms) this._zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this._at(event, this.report).at_s)
    else this._look(this.span.map((at) => at + (Math.sign(sideways) * length) / 8))
  }

  _hover(event, report) {
    const part = partAt(event.currentTarget, report.ranks, this.span, event)
    this.tip.hidden = part === null
    if (part === null) return
    setText(this.tip, this._toldPart(part))
    const box = this.scroll.getBoundingClientRect()
    const left = Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth)
    this.tip.style.left = `${Math.max(0, left)}px`
    this.tip.style.top = `${event.clientY - box.top + 16}px`
  }

  /* What was clicked, in words that stay; the field has its step, a double click zooms to it. */
  _click(event, report) {
    const part = partAt(event.currentTarget, report.ranks, this.span, event)
    if (part === null) return
    this.step.value = part.step + 1
    const regions = report.raw?.ranks?.find((rank) => rank?.rank === part.rank.rank)?.regions ?? {}
    const within = Object.entries(regions)
      .filter(([, values]) => Number.isFinite(values?.[part.step]))
      .map(([name, values]) => `${name.replace(/_s$/, '').replaceAll('_', ' ')} ${seconds(values[part.step])}`)
    const more = within.length ? ` ${this.t('timeline.within', { regions: within.join(', ') })}` : ''
    setText(this.details, this._toldPart(part) + more)
  }

  _toldPart({ rank, step, name, length_s, step_s }) {
    const place = { step: step + 1, rank: rank.rank, device: rank.device }
    if (name === undefined) return this.t('timeline.between', place)
    const figures = { part: this.t(`charts.${name}`), time: seconds(length_s), share: percent(length_s / step_s) }
    return this.t('timeline.part', { ...place, ...figures })
  }

  _toldStep(step) {
    const timed = this.report.ranks.filter((rank) => rank.begin && step < rank.begin.length)
    const lines = timed.slice(0, TOLD_RANKS).map((rank) => {
      const whole = PARTS.reduce((sum, name) => sum + rank[name][step], 0)
      const parts = PARTS.map(
        (name) => `${this.t(`charts.${name}`)} ${seconds(rank[name][step])} (${percent(rank[name][step] / whole)})`
      )
      return `${rank.rank} ${rank.device}: ${parts.join(', ')}`
    })
    if (timed.length > TOLD_RANKS) lines.push('…')
    const time = seconds(this.report.steps[step])
    return [this.t('timeline.stepTook', { step: step + 1, time }), ...lines].join('\n')
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
    const id = this.report.raw?.run_id // a file that was opened may have any value there
    return `parallel-dit-${typeof id === 'string' ? id.slice(0, 8) : (this.report.kind ?? 'report')}`
  }

  async _png() {
    const { report, t, figures } = this
    const quote = quoteText(this._entry?.summary?.quote, t)
    const parts = figures.map((figure) => [figure.firstChild.textContent, figure.querySelector('canvas')])
    const picture = pngOf({
      title: t('timelineTitle'),
      lines: [describeRun(report, t), headline(report, t), quote, t('timeline.order')].filter(Boolean),
      legend: Object.entries(COLOURS).map(([name, colour]) => [t(`charts.${name}`), colour]),
      parts: [['', this.rows], ...parts],
      background: themeColour(this.root, '--comfy-menu-bg', '#222'),
      text: themeColour(this.root, '--input-text', '#ddd')
    })
    download(`${this._name}.png`, await picture)
  }

  async _share() {
    if (!this._hasReport()) return
    const { openShareCard } = await import('./share_card.mjs')
    const { speedup, quote } = this._entry?.summary ?? {}
    await openShareCard({ ...this, speedup, quote, name: this._name })
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
    return Boolean(this.report.raw)
  }
}
