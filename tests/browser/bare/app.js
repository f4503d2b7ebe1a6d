/* As ComfyUI's scripts/app.js, as far as the panel asks it: tabs, settings, toasts, commands and a graph of plain nodes.

   Nothing is drawn but what the pack draws itself. `window.executed` are the commands that were asked for. */

import { api } from './api.js'

const byId = (id) => document.getElementById(id)
const extensions = []
const settings = new Map()
const changes = new Map() // by setting, what hears of a change
const tabs = []
window.executed = []

/* A place that shows one tab at a time. */
function makePlace(id, opened) {
  let shown = null
  return (tab) => {
    shown?.destroy?.()
    byId(id).replaceChildren()
    shown = shown === tab ? null : tab
    opened(shown?.id ?? null)
    if (shown !== null) shown.render(byId(id).appendChild(document.createElement('div')))
  }
}

const sidebarTab = {
  activeSidebarTabId: null,
  toggleSidebarTab: (id) => showSidebar(tabs.find((tab) => tab.id === id))
}
const bottomPanel = {
  activeBottomPanelTabId: null,
  toggleBottomPanelTab: (id) => showBottom(extensions.flatMap((each) => each.bottomPanelTabs ?? []).find((tab) => tab.id === id))
}
const showSidebar = makePlace('sidebar', (id) => (sidebarTab.activeSidebarTabId = id))
const showBottom = makePlace('bottom', (id) => (bottomPanel.activeBottomPanelTabId = id))

const extensionManager = {
  sidebarTab,
  bottomPanel,
  getSidebarTabs: () => tabs,
  registerSidebarTab(tab) {
    tabs.push(tab)
    const button = document.querySelector('nav').appendChild(document.createElement('button'))
    Object.assign(button, { textContent: tab.title, className: `${tab.id}-tab-button`, onclick: () => showSidebar(tab) })
  },
  setting: {
    get: (id) => settings.get(id),
    async set(id, value) {
      settings.set(id, value)
      changes.get(id)?.(value)
    }
  },
  toast: {
    add({ summary, detail }) {
      const toast = byId('toasts').appendChild(document.createElement('p'))
      Object.assign(toast, { className: 'p-toast-message', textContent: `${summary}: ${detail}` })
    },
    removeAll: () => byId('toasts').replaceChildren()
  },
  command: {
    execute(id) {
      window.executed.push(id)
      const [, tab] = id.split('Workspace.ToggleBottomPanelTab.')
      if (tab) bottomPanel.toggleBottomPanelTab(tab)
    }
  },
  dialog: {
    confirm: async ({ message }) => {
      window.confirmed = [...(window.confirmed ?? []), message]
      return true
    }
  }
}

class Node {
  constructor() {
    const kind = this.constructor.nodeData.name
    Object.assign(this, { comfyClass: kind, type: kind, title: kind, mode: 0, size: [300, 200], widgets: [], inputs: [] })
    this.box = document.createElement('div')
  }

  addDOMWidget(name, type, element, options) {
    this.widgets.push({ name, type, element, options, serialize: false })
    this.box.append(element)
  }

  computeSize() {
    return this.size
  }

  setSize(size) {
    this.size = size
  }

  getOutputNodes() {
    return this.graph.nodes.filter((node) => node.inputs.some((input) => input.from === this))
  }

  getInputNode(slot) {
    return this.inputs[slot]?.from
  }

  configure() {}

  serialize() {}
}

const graph = {
  id: 'bare graph',
  nodes: [],
  _nodes_by_id: {},
  clear() {
    for (const node of this.nodes) {
      node.onRemoved?.()
      node.box.remove()
    }
    Object.assign(this, { nodes: [], _nodes_by_id: {} })
  }
}

const types = {}
window.LiteGraph = { registered_node_types: types }

/* Put nodes into the graph, in place of those that were there: [class, {widget: value}, {input: class of the node}]. */
window.load = (described) => {
  graph.clear()
  for (const [kind, widgets, links] of described) {
    types[kind] ??= Object.assign(class extends Node {}, { title: kind })
    types[kind].nodeData = { name: kind, display_name: kind, python_module: 'custom_nodes.parallel-dit' }
    const node = new types[kind]()
    node.widgets.push(...Object.entries(widgets).map(([name, value]) => ({ name, value, options: { values: [value] } })))
    node.inputs = Object.entries(links).map(([name, from]) => ({ name, from: graph.nodes.find((each) => each.type === from) }))
    node.id = graph.nodes.length + 1
    node.graph = graph
    graph.nodes.push(node)
    graph._nodes_by_id[node.id] = node
    document.querySelector('.graph-canvas-panel').append(node.box)
    for (const each of extensions) each.nodeCreated?.(node)
    node.onConfigure?.()
  }
}

export const app = (window.app = {
  api,
  graph,
  extensionManager,
  async registerExtension(extension) {
    extensions.push(extension)
    for (const { id, defaultValue, onChange } of extension.settings) {
      settings.set(id, defaultValue)
      changes.set(id, onChange)
    }
    await extension.setup()
  }
})
