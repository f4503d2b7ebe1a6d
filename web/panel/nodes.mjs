/* What is shown on the pack's nodes: the last result, and on SP Config the plan, before anything is queued.

   By addDOMWidget alone, which both renderers draw. */

import { h, setAttribute, setText } from './dom.mjs'
import { bytes, largest, median, percent } from './figures.mjs'
import { isOf } from './graph.mjs'
import { orderInputs } from './input_order.mjs'
import { AXES } from './mesh.mjs'
import { addLiveLine, showTextsOf } from './node_text.mjs'
import { showTables } from './report_table.mjs'
import { CONFIG, LOADERS, isGone, isOff } from './workflow.mjs'
import { COLOURS } from './timeline_rows.mjs'
import { readReport } from './report.mjs'
import { RUNS } from './store.mjs'
import { headline, makeHero } from './sidebar.mjs'
import { liveShare, liveText } from './told.mjs'

const MEASURED = {
  ParallelSampler: RUNS,
  ParallelFluxSampler: RUNS,
  ParallelFluxListSampler: RUNS,
  TimedVAEDecode: ['vae', 'vae_decode'],
  ParallelBenchmark: ['benchmark']
}
const SHOWS_REPORTS = 'ShowTimingReport'
const OF_A_LOADER = ['unet_name', 'weight_dtype']
const WHERE = ['devices', 'machines'] // what an SP Config names its workers by
const MANUAL_ONLY = new Set([...AXES, 'patches', 'warmup_steps'])
const STAGES_ONLY = new Set(['patches', 'warmup_steps'])
const ASK_AFTER_MS = 250
const HEIGHT = 76
const MARGINS = 20 // of a widget, above and below together
const PLANS_HEIGHT = 106 // five lines: the plan, two devices, their memory, which takes two
const PLANS_MOST = 264 // twelve lines, in the classic renderer, which spreads a node's spare room over its boxes
const SAMPLERS_HEIGHT = 148 // room for all that a run says in seven lines, so that nothing moves or is cut when it comes
const TABLES_HEIGHT = 180

/** Give a node of ours what belongs on it; leave every other node alone. */
export function prepareNode(node, services) {
  if (node.comfyClass in MEASURED) addResult(node, services)
  else if (node.comfyClass === CONFIG) addPlan(node, services)
  else if (LOADERS.has(node.comfyClass)) afterChange(node, OF_A_LOADER, () => asking.forEach((ask) => ask()))
  else if (node.comfyClass === SHOWS_REPORTS) addTables(node, services)
}

function addTables(node, { t }) {
  const box = h('div', { class: 'pdit-node pdit-tables', 'data-testid': 'pdit-tables', tabindex: 0 })
  box.append(h('p', { text: t('node.noRun') }))
  const options = { serialize: false, hideOnZoom: false, getMinHeight: () => TABLES_HEIGHT }
  node.addDOMWidget('parallel_dit_tables', 'parallel_dit_tables', box, options)
  const before = node.onExecuted
  node.onExecuted = function (output, ...rest) {
    before?.call(this, output, ...rest)
    if (Array.isArray(output?.parallel_dit)) showTables(box, output.parallel_dit, t)
  }
}

function addResult(node, { store, t, actions, showResults }) {
  if (!showResults()) return
  const kinds = MEASURED[node.comfyClass]
  const text = h('div', { text: t('node.noRun') })
  const share = h('div', { class: 'pdit-share' })
  const hero = makeHero(t, actions, true)
  const box = h('div', { class: 'pdit-node', 'data-testid': 'pdit-result', role: 'status' }, hero.root, text, share)
  const height = kinds === RUNS ? SAMPLERS_HEIGHT : HEIGHT
  addBox(node, 'parallel_dit_result', box, height)
  const view = { node, kinds, text, share, hero, box, report: null, key: null, told: null, live: null, t }
  const before = node.onExecuted
  node.onExecuted = function (output, ...rest) {
    before?.call(this, output, ...rest)
    const [raw] = output?.parallel_dit ?? []
    if (raw === undefined) return
    view.told = readReport(raw)
    update(view, store)
  }
  whileThere(node, (end) => store.subscribe(() => (isGone(node) ? end() : update(view, store))))
  const later = () => setTimeout(() => update(view, store)) // once it has its id and its graph
  for (const name of ['onAdded', 'onConfigure']) {
    const earlier = node[name]
    node[name] = function (...all) {
      later()
      return earlier?.apply(this, all)
    }
  }
  addLiveLine(node, box)
}

/* Have `begin(end)`, which returns what ends it, hear of changes while the node is in a workflow: copies of nodes that
   are made only to be saved never are. */
function whileThere(node, begin) {
  let stop = null
  const end = () => {
    stop?.()
    stop = null
  }
  const start = () => (stop ??= begin(end))
  for (const [event, does] of [['onAdded', start], ['onRemoved', end]]) {
    const before = node[event]
    node[event] = function (...all) {
      does()
      return before?.apply(this, all)
    }
  }
  if (node.graph) start()
}

/* The run in progress, else the last one of this node that the server remembers, else the one this page was told. */
async function update(view, store) {
  const { node, t } = view
  const { run, reports, session } = store.state ?? {}
  const keyOf = (each) => each && `${session}:${each.number}` // numbers begin anew when ComfyUI does
  const mine = (each) => isOf(node, each.node_id, each.graph)
  const entry = store.newestOf(view.kinds, mine)
  const newest = keyOf(reports?.findLast(mine)) // of a comparison alone, too
  if (run && isOf(node, run.node, run.graph)) {
    if (view.live?.prompt !== run.prompt) {
      view.live = { newest, prompt: run.prompt } // of queued runs the next may begin before the last is seen to end
      setText(view.box.firstChild, '') // what the one before said
    }
    return showLive(view, run)
  }
  if (view.live !== null) {
    view.stoppedAt = view.live.newest === newest ? (newest ?? '') : undefined
    setText(view.box.firstChild, '') // what it said meanwhile
  }
  view.live = null
  view.stopped = view.stoppedAt === (newest ?? '') // until a newer report is there
  if (entry && keyOf(entry) !== view.key) {
    const key = (view.key = keyOf(entry))
    const raw = await store.report(entry.number).catch(() => undefined)
    if (view.key !== key || view.live !== null) return
    if (raw !== undefined) view.report = readReport(raw)
  }
  if (!entry) view.report = view.told
  show(view, entry, t)
}

function showLive(view, run) {
  const { box, text, share, hero, t } = view
  view.drawn = undefined
  setAttribute(box, 'data-live', 'true')
  hero.show(undefined)
  setText(text, liveText(run, t))
  share.replaceChildren(h('i', { style: `flex:${liveShare(run)};background:${COLOURS.compute}` }))
  share.append(h('i', { style: `flex:${1 - liveShare(run)}` }))
}

function show(view, entry, t) {
  const { box, text, share, hero, report } = view
  setAttribute(box, 'data-live', null)
  hero.show(view.stopped ? undefined : entry)
  const lines = view.stopped ? [t(report ? 'node.stopped' : 'node.stoppedFirst')] : []
  if (report) lines.push(`${headline(report, t)}${memoryText(report, t)}`)
  setText(text, lines.join('\n') || t('node.noRun'))
  if (view.drawn === report) return
  view.drawn = report
  drawShare(share, report, t)
}

function addBox(node, name, box, height, most = height * 1.5) {
  box.style.minHeight = `${height - MARGINS}px` // the classic renderer's; Nodes 2.0 would have it grow and shrink
  const options = { serialize: false, hideOnZoom: false, getMinHeight: () => height, getMaxHeight: () => most }
  return node.addDOMWidget(name, name, box, options)
}

function memoryText(report, t) {
  const held = report.memory.map((row) => row.allocated_bytes ?? row.resident_bytes).filter(Number.isFinite)
  if (held.length === 0) return ''
  const ranks = held.length === 1 ? t('figures.oneRank') : t('figures.ranks', { ranks: held.length })
  return `\n${ranks} · ${bytes(largest(held))}`
}

/* How rank 0's time divides: the bar under the text. */
function drawShare(bar, report, t) {
  const rank = report?.ranks.find((each) => each.begin)
  const parts = rank ? ['compute', 'communication', 'idle'].map((name) => [name, median(rank[name])]) : []
  const whole = parts.reduce((sum, [, value]) => sum + value, 0) // shares of 1 would leave a part of the bar empty
  bar.replaceChildren(
    ...parts
      .filter(([, value]) => value > 0)
      .map(([name, value]) => {
        const title = `${t(`charts.${name}`)} ${percent(value / whole)}`
        return h('i', { style: `flex:${(100 * value) / whole};background:${COLOURS[name]}`, title })
      })
  )
}

function addPlan(node, { store, t }) {
  const box = h('div', { class: 'pdit-node', 'data-testid': 'pdit-plan', role: 'status' })
  addBox(node, 'parallel_dit_plan', box, PLANS_HEIGHT, PLANS_MOST)
  orderInputs(node)
  for (const widget of node.widgets ?? []) widget.advanced = widget.options?.advanced // what the classic renderer asks
  node.getLayoutWidgets = function () {
    return (this.widgets ?? []).filter(({ hidden, advanced }) => !hidden && (this.showAdvanced || !advanced))
  } // its own leaves room for advanced inputs that it does not draw
  showTextsOf(node, (text) => setText(box, text))
  let timer = 0
  let asked = 0
  const ask = async () => {
    if (!node.graph) return // a copy that is made to be saved
    const mine = ++asked
    if (node.widgets?.some(({ name }) => isLinked(node, name))) return tell(node, box, {}, t) // its value is not here
    try {
      const answer = await store.plan(values(node))
      if (mine === asked) tell(node, box, answer, t)
    } catch {
      if (mine === asked) tell(node, box, {}, t) // an old server, or none: the node itself will say
    }
  }
  const changed = (opened = false) => {
    showNeeded(node, opened === true)
    clearTimeout(timer)
    timer = setTimeout(ask, ASK_AFTER_MS)
  }
  afterChange(node, null, changed)
  for (const event of ['onConfigure', 'onConnectionsChange']) {
    const before = node[event]
    node[event] = function (...all) {
      before?.apply(this, all)
      if (event === 'onConfigure') showChosen(node)
      changed(event === 'onConfigure')
    }
  }
  let calibrations
  whileThere(node, (end) => {
    const again = () => (isGone(node) ? end() : changed())
    const deaf = store.subscribe(({ state }) => {
      if (isGone(node)) return end()
      const now = state && `${state.session}:${state.calibrations}` // measured devices change what auto takes
      if (calibrations && now && now !== calibrations) changed()
      calibrations = now ?? calibrations
    })
    asking.add(again)
    return () => {
      asking.delete(again)
      deaf()
      clearTimeout(timer)
    }
  })
  changed()
}

const asking = new Set() // what asks again for each SP Config: a loader's file changes the plan of its SP Config

/* Call `then` when a widget of these names has changed, of any where `names` is null. */
function afterChange(node, names, then) {
  for (const widget of node.widgets ?? []) {
    if (names !== null && !names.includes(widget.name)) continue
    const before = widget.callback
    widget.callback = function (...all) {
      const result = before?.apply(this, all)
      then()
      return result
    }
  }
}

/* Whether an input comes from another node, as those of a subgraph do: the widget's value is not what runs. */
function isLinked(node, name) {
  return (node.inputs ?? []).some((input) => (input.widget?.name ?? input.name) === name && input.link != null)
}

function values(node) {
  const given = (node.widgets ?? []).filter(
    (widget) => widget.serialize !== false && widget.options?.serialize !== false
  )
  return { ...ofLoader(node), ...Object.fromEntries(given.map((widget) => [widget.name, String(widget.value)])) }
}

/* The file of the first loader that is linked to an SP Config: plan and memory are those of this file. Those of the
   others on the same devices want room beside it. */
function ofLoader(node) {
  if (!node.graph) return {}
  const alike = (other) => WHERE.every((name) => valueOf(other, name) === valueOf(node, name))
  const more = node.graph.nodes.filter((each) => each !== node && each.comfyClass === CONFIG && !isOff(each) && alike(each))
  const own = loadersOf(node)
  const [loader, ...others] = [...own, ...(own.length ? more.flatMap(loadersOf) : [])].map(fileOf)
  const beside = others.flatMap((each) => each.unet_name ?? [])
  return { ...loader, ...(beside.length > 0 && { beside: beside.join('\n') }) }
}

function loadersOf(config) {
  return (config.getOutputNodes(0) ?? []).filter((each) => LOADERS.has(each.comfyClass) && !isOff(each))
}

function valueOf(node, name) {
  return node.widgets?.find((widget) => widget.name === name)?.value
}

function fileOf(loader) {
  const widgets = (loader.widgets ?? []).filter((widget) => OF_A_LOADER.includes(widget.name) && widget.value)
  return Object.fromEntries(widgets.map((widget) => [widget.name, String(widget.value)]))
}

/* Values that cannot work are marked here, before they are queued, in the words that the node would use. */
function tell(node, box, answer, t) {
  const bad = typeof answer.error === 'string'
  setAttribute(box, 'data-verdict', bad ? 'bad' : null)
  const lines = bad ? [answer.error] : planLines(answer, t)
  setText(box, lines.join('\n'))
  setAttribute(box, 'title', lines.join('\n'))
  if (node.has_errors !== bad) {
    node.has_errors = bad
    node.setDirtyCanvas?.(true, true)
  }
}

function planLines(answer, t) {
  if (!answer.plan) return []
  const first = t('node.plan', { plan: answer.plan, devices: answer.devices.join(', ') })
  return [first, ...memoryLines(answer.memory, t), ...(answer.reasons ?? []), ...answer.warnings]
}

function memoryLines(memory, t) {
  if (memory === undefined) return []
  const { device, host, total, fullest: name } = memory
  const key = `node.${memory.weights_alone ? 'weights' : 'memory'}${name ? 'OfFullest' : ''}`
  const line = t(key, { device: bytes(device), total: bytes(total), name })
  return [host ? `${line} ${t('node.host', { host: bytes(host) })}` : line]
}

/* A workflow that sets an advanced input shows it, so that nothing that was chosen is out of sight. */
function showChosen(node) {
  const about = node.constructor.nodeData?.input?.optional ?? {}
  const chosen = (widget) => {
    const { advanced, default: usual } = about[widget.name]?.[1] ?? {}
    return advanced === true && usual !== undefined && widget.value !== usual
  }
  if ((node.widgets ?? []).some(chosen)) node.showAdvanced = true
}

/* Both renderers: the classic one asks the widget, Nodes 2.0 its options. Hidden values are kept and saved. */
function showNeeded(node, opened) {
  const value = (name) => valueOf(node, name)
  const linked = isLinked(node, 'mode')
  const manual = linked || value('mode') === 'manual'
  const stages = linked || (manual && (isLinked(node, 'pipefusion') || value('pipefusion') > 1))
  let changed = false
  for (const widget of node.widgets ?? []) {
    if (!MANUAL_ONLY.has(widget.name)) continue
    const hide = STAGES_ONLY.has(widget.name) ? !stages : !manual
    if (widget.hidden === hide && widget.options?.hidden === hide) continue
    widget.hidden = hide
    widget.options = Object.assign(widget.options ?? {}, { hidden: hide })
    changed = true
  }
  if (!changed) return
  const [width, height] = node.size
  const least = node.computeSize()[1]
  node.setSize([width, opened ? Math.max(height, least) : least]) // a workflow has the room that it was saved with
  node.setDirtyCanvas?.(true, true)
}
