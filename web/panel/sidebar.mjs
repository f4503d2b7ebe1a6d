/* The sidebar tab: pools, ranks, plan, last run, buttons, the doctor's findings. Updates in place, never rebuilds. */

import { h, keyed, setAttribute, setText } from './dom.mjs'
import { makeChecklist, updateChecklist } from './checklist.mjs'
import { makeDoctor, updateDoctor } from './doctor.mjs'
import { bytes, percent, seconds, times } from './figures.mjs'
import { makeMachines, updateMachines } from './machines.mjs'
import { drawMesh, meshKeys, ranksOf } from './mesh.mjs'
import { readReport } from './report.mjs'
import { COLOURS, PARTS } from './timeline_rows.mjs'
import { makeTune, updateTune } from './tune.mjs'
import { heroNote, heroText, lacksOneDevice, liveShare, liveText, planName, runName } from './told.mjs'
import { quoteText, suggestedName, suggestionText, verdictText } from './told.mjs'

/** Put the panel into `element`. `actions.run(name, values)` does a button's work, `actions.measure(entry)` and
    `actions.apply(entry)` those of a run; `actions.first` is the checklist's. Returns what takes it away. */
export function mountSidebar(element, store, t, actions) {
  const part = (name, ...children) => h('section', { class: `pdit-${name}` }, ...children)
  const buttons = ['release', 'restart', 'doctor'].map((name) => actionButton(name, t, actions))
  const timeline = h('button', {
    type: 'button',
    class: 'pdit-button',
    text: t('panel.timeline'),
    onclick: () => actions.run('timeline')
  })
  const nothing = h('p', { class: 'pdit-quiet', 'data-testid': 'pdit-nothing' })
  const notes = h('ul', { class: 'pdit-notes', 'data-testid': 'pdit-notes' })
  const pools = h('div', { 'data-testid': 'pdit-pools' })
  const machines = makeMachines(t, actions)
  const hero = makeHero(t, actions)
  const run = part('run', h('h3', { text: t('panel.lastRun') }), hero.root, h('p', { 'data-testid': 'pdit-headline' }))
  const doctor = makeDoctor(t)
  const tune = makeTune(t, actions)
  const checklist = makeChecklist(t, actions.first)
  const root = h(
    'div',
    { class: 'pdit pdit-sidebar', 'data-testid': 'pdit-sidebar' },
    h('div', { class: 'pdit-buttons', role: 'toolbar', 'aria-label': t('panel.actions') }, ...buttons, timeline),
    checklist,
    notes,
    nothing,
    pools,
    machines,
    run,
    tune,
    doctor
  )
  element.replaceChildren(root)
  const view = { root, buttons, notes, nothing, pools, machines, run, hero, tune, doctor, checklist, shown: null }
  const end = store.subscribe(() => update(view, store, t))
  return () => {
    end()
    root.remove()
  }
}

function actionButton(name, t, actions) {
  return h('button', {
    type: 'button',
    class: 'pdit-button',
    'data-action': name,
    title: t(`panel.tips.${name}`),
    text: t(`panel.${name}`),
    onclick: () => actions.run(name)
  })
}

function update(view, store, t) {
  const { state, problem } = store
  const pools = state?.pools ?? []
  const live = pools.filter((pool) => pool.state !== 'stopped')
  setText(
    view.nothing,
    problem
      ? t(store.notLoaded ? 'panel.notLoaded' : 'panel.unreachable', { problem: t.said(problem) })
      : state === null
        ? t('panel.asking')
        : live.length
          ? ''
          : t('panel.noPool')
  )
  view.nothing.hidden = view.nothing.textContent === ''
  updateNotes(view.notes, state?.comfyui?.notes, t)
  for (const button of view.buttons) {
    const name = button.dataset.action
    const useless = state === null || state.action !== null || (name !== 'doctor' && live.length === 0)
    button.disabled = useless
    setAttribute(button, 'aria-busy', state?.action === name ? 'true' : null)
  }
  keyed(
    view.pools,
    live,
    (pool) => pool.ranks.map((rank) => rank.device).join(),
    () => makePool(t),
    (card, pool) => updatePool(card, pool, state, t)
  )
  updateMachines(view.machines, state, t)
  updateRun(view, store, t)
  updateChecklist(view.checklist, store, t)
  updateTune(view.tune, state, t)
  updateDoctor(view.doctor, state?.doctor ?? { state: 'never' }, t)
}

/* What there is to know of this ComfyUI: that it is newer than those tested, and what is off in it. */
function updateNotes(list, notes, t) {
  const texts = Array.isArray(notes) ? notes.map((text) => t.said(String(text))) : []
  list.hidden = texts.length === 0
  keyed(
    list,
    texts,
    (text) => text,
    () => h('li', {}),
    (row, text) => setText(row, text)
  )
}

function makePool(t) {
  return h(
    'section',
    { class: 'pdit-pool' },
    h('h3', {}),
    h('p', { class: 'pdit-failure', role: 'alert', hidden: '' }),
    h('p', { class: 'pdit-quiet' }),
    h('p', { class: 'pdit-live', 'data-testid': 'pdit-live' }, h('span', {}), h('i', {})),
    h('div', { class: 'pdit-plan' }),
    h('ul', { class: 'pdit-ranks', 'aria-label': t('panel.ranks') })
  )
}

function updatePool(card, pool, state, t) {
  const [title, failure, models, live, plan, ranks] = card.children
  setText(title, poolText(pool, state, t))
  setAttribute(title, 'title', t('panel.generation', { generation: pool.generation }))
  const failed = pool.state === 'failed' && typeof pool.last_failure === 'string' // else it is of workers of before
  failure.hidden = !failed
  setText(failure, failed ? pool.last_failure : '')
  setText(
    models,
    pool.models.map((model) => `${model.name} · ${model.dtype} · ${model.weights}`).join('\n') || t('panel.noModel')
  )
  const run = runOf(pool, state)
  setText(live.children[0], run ? liveText(run, t) : '')
  live.children[1].style.width = `${(100 * liveShare(run)).toFixed(1)}%`
  const newest = pool.plans.at(-1)
  const drawn = JSON.stringify([newest, pool.ranks.length])
  if (plan.dataset.drawn !== drawn) {
    plan.dataset.drawn = drawn
    plan.replaceChildren(...(newest ? [drawMesh(newest, pool.ranks.length, t), meshKeys(newest, t)] : []))
  }
  keyed(
    ranks,
    pool.ranks,
    (rank) => rank.rank,
    makeRank,
    (row, rank) => updateRank(row, rank, pool, state, t)
  )
}

function makeRank() {
  return h(
    'li',
    { class: 'pdit-rank-row' },
    h('span', { class: 'pdit-chip' }),
    h('strong', {}),
    h('span', { class: 'pdit-model' }),
    h('span', { class: 'pdit-state' }),
    h('div', { class: 'pdit-bar', role: 'meter', 'aria-valuemin': 0, 'aria-valuemax': 100 }, h('div', {})),
    h('span', { class: 'pdit-memory' }),
    h('div', { class: 'pdit-live-share', role: 'img' }, ...PARTS.map((part) => h('i', { style: `background:${COLOURS[part]}` }))),
    h('span', { class: 'pdit-live-text' })
  )
}

/* Where the rank's time goes in the run that is under way. It has its place at all times, so that nothing moves. */
function updateLiveShare(bar, text, shares, t) {
  const known = PARTS.every((part) => Number.isFinite(shares?.[part]))
  bar.style.visibility = known ? '' : 'hidden'
  PARTS.forEach((part, place) => (bar.children[place].style.flexGrow = known ? 100 * shares[part] : 0))
  const told = known ? PARTS.map((part) => `${t(`charts.${part}`)} ${percent(shares[part])}`).join(', ') : null
  setAttribute(bar, 'aria-label', told)
  setAttribute(bar, 'title', told)
  setText(text, known ? t('live.computing', { share: percent(shares.compute) }) : '')
}

function updateRank(row, rank, pool, state, t) {
  const [chip, device, model, status, bar, memory, shareBar, shareText] = row.children
  const failed = pool.state === 'failed' && (pool.failed_rank === rank.rank || pool.failed_rank === null)
  const asleep = isAsleep(rank, pool)
  const ended = pool.state === 'failed' && !failed
  setText(chip, String(rank.rank))
  setAttribute(row, 'data-state', asleep ? 'asleep' : pool.sampling ? 'busy' : ended ? 'ended' : pool.state)
  setText(device, rank.device)
  setText(model, rank.model ?? '')
  setText(status, asleep ? t('states.asleep') : ended ? t('states.ended') : stateText(pool, state, t))
  const used = rank.memory?.allocated_bytes ?? rank.memory?.resident_bytes
  const share = Number.isFinite(used) && rank.memory_bytes > 0 ? Math.min(1, used / rank.memory_bytes) : null
  bar.style.visibility = share === null ? 'hidden' : ''
  bar.firstChild.style.width = share === null ? '0' : `${(share * 100).toFixed(1)}%`
  setAttribute(bar, 'aria-valuenow', share === null ? null : Math.round(share * 100))
  setAttribute(bar, 'aria-label', t('panel.memory'))
  setText(
    memory,
    !Number.isFinite(used)
      ? t('panel.noMemory')
      : rank.memory_bytes > 0
        ? `${bytes(used)} / ${bytes(rank.memory_bytes)}`
        : bytes(used)
  )
  updateLiveShare(shareBar, shareText, pool.sampling ? rank.shares : undefined, t)
}

/** The run that a pool is in, or null. */
export function runOf(pool, state) {
  return pool.sampling && state?.run ? state.run : null
}

/** Whether a rank has nothing to do in the plan that the pool ran last. */
export function isAsleep(rank, pool) {
  const newest = pool.plans?.at(-1)
  return ['idle', 'busy'].includes(pool.state) && newest !== undefined && rank.rank >= ranksOf(newest)
}

/** Which devices a pool has and what they do: `2 GPUs ready`, `1 GPU, 2 GPUs on attic: step 3 of 20`. */
export function poolText(pool, state, t) {
  const groups = new Map() // by machine and kind, in rank order
  for (const { device, kind } of pool.ranks) {
    const machine = / on (.+)$/.exec(device)?.[1] ?? ''
    const key = JSON.stringify([machine, kind])
    groups.set(key, (groups.get(key) ?? 0) + 1)
  }
  const named = [...groups].map(([key, count]) => {
    const [machine, kind] = JSON.parse(key)
    const word = { cuda: 'gpu', cpu: 'cpuRank' }[kind] ?? 'device'
    const devices = t(`devices.${count === 1 ? 'one' : 'many'}.${word}`, { count })
    return machine ? t('devices.on', { devices, machine }) : devices
  })
  const devices = named.join(t('devices.comma'))
  if (pool.state === 'idle' && !runOf(pool, state)) return t('panel.ready', { devices })
  return t('panel.workers', { devices, state: stateText(pool, state, t) })
}

/** What a pool does, in a word; in a run, which step. */
function stateText(pool, state, t) {
  const run = runOf(pool, state)
  if (!Number.isFinite(run?.steps)) return t(`states.${pool.state}`)
  const number = { step: Math.min(run.step + 1, run.steps), steps: run.steps }
  return t(run.class === 'ParallelBenchmark' ? 'states.run' : 'states.step', number)
}

/** The figure of a run, its verdict, and what can be done about them; `show(entry)` with an entry of the state. */
export function makeHero(t, actions, small = false) {
  const button = (name) => h('button', { type: 'button', class: 'pdit-button', 'data-action': name })
  const [measure, apply] = [button('measure'), button('apply')]
  setText(measure, t('hero.measure'))
  setAttribute(measure, 'title', t('hero.measureTip'))
  const [figure, quote, note, verdict] = ['hero', 'quote', 'note', 'verdict'].map((name) =>
    h('div', { class: `pdit-${name}`, 'data-testid': `pdit-${name}` })
  )
  const root = h('div', { class: 'pdit-figures' }, figure, ...(small ? [] : [note]), quote, verdict)
  let shown
  measure.addEventListener('click', () => actions.measure(shown))
  apply.addEventListener('click', () => actions.apply(shown))
  const show = (entry) => {
    shown = entry
    const { summary } = entry ?? {}
    const text = heroText(summary, t)
    const lacks = lacksOneDevice(summary)
    setText(figure, text)
    setAttribute(figure, 'title', text ? heroNote(summary, t) : null)
    figure.hidden = text === ''
    setText(quote, quoteText(summary?.quote, t))
    quote.hidden = quote.textContent === ''
    setText(note, text ? heroNote(summary, t) : lacks ? t('hero.none') : '')
    note.hidden = note.textContent === ''
    const found = suggestionText(summary, t)
    setText(verdict, [verdictText(summary, t), found].filter(Boolean).join(' '))
    verdict.hidden = verdict.textContent === ''
    setAttribute(verdict, 'data-verdict', summary?.verdict ?? null)
    if (found) setText(apply, t('verdict.apply', { plan: suggestedName(summary.suggestion, t) }))
    place(root, measure, lacks)
    place(root, apply, found !== '')
  }
  return { root, show }
}

/* Have a button in the page only while it does something, so that keys meet no other. */
function place(root, button, there) {
  if (!there) button.remove()
  else if (!button.isConnected || button.parentElement !== root) root.append(button)
}

async function updateRun(view, store, t) {
  const [title, , line] = view.run.children
  const entry = store.newestRun()
  const wanted = `${store.state?.session}:${entry?.number}`
  setText(title, entry?.summary ? t('panel.lastRunOf', { run: runName(entry, t) }) : t('panel.lastRun'))
  view.hero.show(entry)
  if (view.shown === wanted) return
  view.shown = wanted
  if (entry === undefined) return setText(line, t('panel.noRun'))
  setText(line, '…')
  try {
    const report = readReport(await store.report(entry.number))
    if (view.shown === wanted) setText(line, headline(report, t))
  } catch (error) {
    if (view.shown === wanted) setText(line, String(error.message ?? error))
  }
}

/** A run in one line: what was measured of it, and nothing else. */
export function headline(report, t) {
  if (report.problem) return t(report.problem)
  const figures = report.headline ?? {}
  const parts = []
  if (Number.isFinite(figures.decode_s)) parts.push(t('figures.decode', { time: seconds(figures.decode_s) }))
  if (Number.isFinite(figures.step_s)) parts.push(t('figures.step', { time: seconds(figures.step_s) }))
  if (Number.isFinite(figures.speedup)) parts.push(t('figures.speedup', { factor: times(figures.speedup) }))
  if (Number.isFinite(figures.skew)) parts.push(t('figures.skew', { share: percent(figures.skew) }))
  if (Number.isFinite(figures.denoise_s))
    parts.push(t('figures.total', { time: seconds(figures.denoise_s), steps: report.steps.length }))
  if (report.plan?.name) parts.push(planName({ plan: report.plan.name, ranks: report.plan.ranks }, t))
  if (report.older) parts.push(t('report.older'))
  return parts.join(' · ') || t('report.nothing')
}
