/* Where ComfyUI's frontend enters the pack: the tabs, commands, settings and what is shown on the nodes.

   ComfyUI loads every .js below web/ as an extension; all else of ours is .mjs and imported from here. */

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { ErrorCard } from './panel/error_card.mjs'
import { applySuggestion, measureOneDevice, showBeside, graphId } from './panel/graph.mjs'
import { allNodes, applyPlan, hasFiles } from './panel/workflow.mjs'
import { clearTexts, showText } from './panel/node_text.mjs'
import { prepareNode } from './panel/nodes.mjs'
import { pictureOf } from './panel/picture.mjs'
import { Store } from './panel/store.mjs'
import { mountSidebar } from './panel/sidebar.mjs'
import { mountStrip } from './panel/strip.mjs'
import { makeSaid, makeWords } from './panel/words.mjs'

const SIDEBAR = 'parallel-dit'
const SAID_IN = ['zh'] // languages that the server's sentences have
const TIMELINE = 'parallel-dit.timeline'
const TOASTS = 'ParallelDiT.Failures.Toasts'
const RESULTS = 'ParallelDiT.Nodes.Results'
const STRIP = 'ParallelDiT.Canvas.Strip'
const FIRST_RUN = 'ParallelDiT.FirstRun.Over'
const FIRST_TEMPLATE = 'z_image_turbo' // it fits most cards

const store = new Store((path, options) => api.fetchApi(path, options))
let words = makeWords(null, 'en')
let english = {} // what nodes are called there, as templates have it
const t = (key, values) => words(key, values)
t.said = (text) => store.said(text) // a sentence of the server's, in the user's language
const card = new ErrorCard(app, t)

function toast(severity, detail, summary = t('title'), more = { life: 6000 }) {
  app.extensionManager.toast.add({ severity, summary, detail, ...more })
}

async function run(name, values) {
  if (name === 'timeline') {
    if (app.extensionManager.bottomPanel?.activeBottomPanelTabId === TIMELINE) return // the command would close it
    return app.extensionManager.command.execute('Workspace.ToggleBottomPanelTab.' + TIMELINE)
  }
  const busy = Boolean(store.state?.run) || store.state?.pools.some((pool) => pool.sampling) // whatever prompt: it ends
  if (busy && !['doctor', 'tune', 'stop_tuning'].includes(name)) {
    const message = t('panel.confirm')
    if (!(await app.extensionManager.dialog.confirm({ title: t(`panel.${name}`), message }))) return
  }
  try {
    await store.act(name, values)
  } catch (error) {
    toast('warn', String(error.message ?? error), t('node.refused'))
  }
}

/* What the buttons of a run do; `entry` is the run's, as the state lists it. */
const actions = {
  run,
  measure: (entry) => done(measureOneDevice(app, entry), 'graph.measuring'),
  apply: (entry) => done(applySuggestion(app, entry), 'graph.applied')
}

async function done(work, text) {
  try {
    await work
    toast('info', t(text))
  } catch (error) {
    toast('warn', t(String(error.message ?? error)), t('node.refused'))
  }
}

const graph = {
  usePlan(plan) {
    const node = applyPlan(app, plan)
    if (node === undefined) toast('warn', t('benchmark.noConfig'), t('node.refused'))
    else toast('success', t('benchmark.used', { node: node.title, plan: plan.name }))
  },
  pictureOf: (report) => pictureOf(api, report)
}

/* The first-run checklist: its end is kept with the user's settings, so another tab or browser knows it. */
const first = {
  isOver: () => app.extensionManager.setting.get(FIRST_RUN) === true,
  setOver: () => app.extensionManager.setting.set(FIRST_RUN, true),
  hasFiles: () => hasFiles(app),
  go(step) {
    if (step === 'doctor') return run('doctor')
    if (step === 'result') return run('timeline')
    if (step === 'files') return openTemplate(FIRST_TEMPLATE)
    return app.extensionManager.command.execute('Comfy.QueuePrompt')
  }
}

/* Opens one of the pack's templates as the list of templates would; the list itself where that fails. */
async function openTemplate(name) {
  try {
    const pack = new URL('.', import.meta.url).pathname.split('/').at(-2) // the folder it was installed to
    const answer = await api.fetchApi(`/workflow_templates/${pack}/${name}.json`)
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`)
    await app.loadGraphData(await answer.json(), true, true, name, { openSource: 'template' })
    const look = () => showBeside(app, document.querySelector('[data-testid="pdit-sidebar"]'))
    requestAnimationFrame(() => requestAnimationFrame(look)) // after ComfyUI's own
  } catch (error) {
    console.warn(error)
    app.extensionManager.command.execute('Comfy.BrowseTemplates')
  }
}

/* A failure is told once: not again after a reload, and not for the failures of before this page was there. It stays
   until it is closed or the workers are started anew. */
function tellFailures() {
  const told = new Map()
  let session = null
  store.subscribe(({ state }) => {
    if (state === null) return
    if (session !== state.session) {
      told.forEach((failure, devices) => failure && card.workersMended(devices)) // they ended with their ComfyUI
      told.clear()
    }
    for (const pool of state.pools) {
      const devices = pool.ranks.map((rank) => rank.device).join()
      const failure = pool.state === 'failed' ? `${pool.generation} ${pool.last_failure}` : ''
      const before = told.get(devices)
      told.set(devices, failure)
      if (before === failure) continue
      if (before) card.workersMended(devices)
      const isNew = session === state.session && failure !== ''
      if (isNew && app.extensionManager.setting.get(TOASTS)) card.workersFailed(devices, String(pool.last_failure ?? ''))
    }
    session = state.session
    markTab(state.pools.some((pool) => pool.state === 'failed'))
  })
}

/* What nodes say while they run, and what ComfyUI tells of those that fail or whose values it refuses. */
function hearPrompts() {
  const nodes = () => allNodes(app.rootGraph ?? app.graph)
  api.addEventListener('parallel_dit.text', ({ detail }) => showText(app, detail, t.said(detail.text)))
  let partly // the prompt that was queued without what the card shown says of it
  const graphs = new Map() // of prompts of this page: another workflow may be open when one fails
  api.addEventListener('execution_start', ({ detail }) => {
    clearTexts(nodes())
    if (partly === undefined || detail?.prompt_id !== partly) card.hide()
  })
  api.addEventListener('execution_interrupted', () => clearTexts(nodes()))
  api.addEventListener('execution_error', ({ detail }) => {
    clearTexts(nodes())
    const of = graphs.get(detail.prompt_id) // of what this page queued
    if (card.failed(detail, of === undefined || of === graphId(app.graph))) partly = undefined
  })
  const tellRefused = (answer) => {
    try {
      if (card.refused(answer)) partly = answer.prompt_id
    } catch (error) {
      console.warn(error) // the prompt is queued all the same
    }
  }
  const queue = api.queuePrompt
  api.queuePrompt = async function (...all) {
    try {
      const answer = await queue.apply(this, all)
      graphs.set(answer?.prompt_id, all[1]?.workflow?.id)
      tellRefused(answer)
      return answer
    } catch (error) {
      tellRefused(error?.response)
      throw error
    }
  }
}

/* The tab's icon tells of a failure also when its toast was closed or came before this page. */
function markTab(failed) {
  const tab = app.extensionManager.getSidebarTabs().find(({ id }) => id === SIDEBAR)
  if (tab && tab.iconBadge !== (failed ? '!' : '')) tab.iconBadge = failed ? '!' : ''
}

async function learnWords() {
  const response = await api.fetchApi('/i18n')
  const translations = response.ok ? await response.json() : null
  const language = app.extensionManager.setting.get('Comfy.Locale') ?? 'en'
  words = makeWords(translations, language)
  english = translations?.en?.nodeDefs ?? {}
  const [known] = language.split('-')
  if (!SAID_IN.includes(known)) return
  const messages = await fetch(new URL(`./panel/messages.${known}.json`, import.meta.url))
  if (messages.ok) store.said = makeSaid(await messages.json())
}

function addStyle() {
  const link = document.createElement('link')
  link.rel = 'stylesheet'
  link.href = new URL('./panel/style.css', import.meta.url).href
  document.head.append(link)
}

/* Tabs are mounted by ComfyUI into an element of its own; what was mounted before is ended first. */
function tab(mount) {
  let end = null
  return {
    type: 'custom',
    render: async (element) => {
      end?.()
      end = await mount(element)
    },
    destroy: () => {
      end?.()
      end = null
    }
  }
}

app.registerExtension({
  name: 'parallel-dit',
  settings: [
    {
      id: TOASTS,
      name: 'Say when workers fail',
      type: 'boolean',
      defaultValue: true,
      category: ['Parallel DiT', 'Failures', 'Toasts']
    },
    {
      id: RESULTS,
      name: 'Show results on sampler and VAE nodes',
      type: 'boolean',
      defaultValue: true,
      category: ['Parallel DiT', 'Nodes', 'Results']
    },
    {
      id: STRIP,
      name: 'Show a strip over the canvas with what the workers do',
      type: 'boolean',
      defaultValue: true,
      category: ['Parallel DiT', 'Canvas', 'Strip'],
      onChange: () => store.tell()
    },
    {
      id: FIRST_RUN,
      name: 'Hide the first-run checklist',
      type: 'boolean',
      defaultValue: false,
      category: ['Parallel DiT', 'First run', 'Over']
    }
  ],
  commands: [
    {
      id: 'ParallelDiT.Release',
      label: 'Parallel DiT: release the workers',
      icon: 'pi pi-eject',
      function: () => run('release')
    },
    {
      id: 'ParallelDiT.Restart',
      label: 'Parallel DiT: restart the workers',
      icon: 'pi pi-refresh',
      function: () => run('restart')
    },
    {
      id: 'ParallelDiT.Doctor',
      label: 'Parallel DiT: run the doctor',
      icon: 'pi pi-heart',
      function: () => run('doctor')
    }
  ],
  menuCommands: [
    {
      path: ['Extensions', 'Parallel DiT'],
      commands: ['ParallelDiT.Release', 'ParallelDiT.Restart', 'ParallelDiT.Doctor']
    }
  ],
  bottomPanelTabs: [
    {
      id: TIMELINE,
      title: 'GPU timeline',
      titleKey: 'parallelDit.timelineTitle',
      ...tab(async (element) => {
        const { mountTimeline } = await import('./panel/timeline.mjs')
        const templates = () => app.extensionManager.command.execute('Comfy.BrowseTemplates')
        return mountTimeline(element, store, t, { toast, templates, ...graph })
      })
    }
  ],
  /* What the card says of a node is of the workflow that was open; ComfyUI takes its own marks away, too. */
  afterConfigureGraph() {
    if (card.about === 'node') card.hide()
  },
  async setup() {
    addStyle()
    await learnWords()
    api.addEventListener('parallel_dit.state', ({ detail }) => store.take(detail))
    api.addEventListener('reconnected', () => store.refresh())
    app.extensionManager.registerSidebarTab({
      id: SIDEBAR,
      icon: 'pi pi-server',
      title: t('title'),
      tooltip: t('title'),
      label: t('title'),
      iconBadge: '',
      ...tab((element) => mountSidebar(element, store, t, { ...actions, first }))
    })
    tellFailures()
    hearPrompts()
    mountStrip(store, t, {
      place: () => document.querySelector('.graph-canvas-panel'),
      shown: () => app.extensionManager.setting.get(STRIP) !== false,
      open: () => app.extensionManager.sidebarTab.toggleSidebarTab(SIDEBAR)
    })
    await store.refresh()
  },
  nodeCreated(node) {
    const showResults = () => app.extensionManager.setting.get(RESULTS) !== false
    prepareNode(node, { store, t, actions, showResults })
  },
  loadedGraphNode(node) {
    const { display_name } = english[node.comfyClass] ?? {}
    if (node.title === display_name) node.title = node.constructor.title // a name that nobody gave it
  }
})
