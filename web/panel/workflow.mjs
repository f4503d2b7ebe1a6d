/* The graph in the editor as our cards need it: which node a message means, going there, bypassing it, setting a plan.

   `app` is ComfyUI's, given by the caller. Nodes inside subgraphs have ids such as `12:5`. */

import { AXES } from './mesh.mjs'

const BYPASSED = 4 // LiteGraph's mode of a node that passes its inputs on
export const CONFIG = 'SPConfig'
export const LOADERS = new Set(['ParallelModelLoader', 'ParallelFluxLoader'])

/** The node of an execution's id, or undefined. */
export function nodeById(app, id) {
  let graph = app.rootGraph ?? app.graph
  let node
  for (const part of String(id).split(':')) {
    node = graph?._nodes_by_id?.[part]
    graph = node?.subgraph
  }
  return node
}

/** All nodes of the open workflow, those in subgraphs too. */
export function allNodes(graph) {
  return (graph?.nodes ?? []).flatMap((node) => [node, ...(node.subgraph ? allNodes(node.subgraph) : [])])
}

/** The folder that a node's class was loaded from, by which ours are known from those of others; '' of ComfyUI's. */
export function packOf(node) {
  const [kind, ...folder] = String(node?.constructor?.nodeData?.python_module ?? '').split('.')
  return kind === 'custom_nodes' ? folder.join('.') : '' // as of a release's archive, NAME-0.2.0
}

/** Show a node in the middle of the canvas, selected. */
export function goTo(app, node) {
  const { canvas } = app
  if (node.graph && canvas.graph !== node.graph) {
    if (canvas.openSubgraph && node.graph !== (app.rootGraph ?? app.graph)) canvas.openSubgraph(node.graph)
    else canvas.setGraph(node.graph)
  }
  canvas.deselectAll?.()
  canvas.selectNode?.(node)
  canvas.centerOnNode(node)
  canvas.setDirty(true, true)
}

/** Let a node pass its inputs on. */
export function bypass(app, node) {
  asOneEdit(app, () => (node.mode = BYPASSED))
  node.setDirtyCanvas?.(true, true)
}

/* Change the graph so that the editor's undo takes back this change, and no other. */
function asOneEdit({ canvas }, change) {
  canvas?.emitBeforeChange?.()
  try {
    change()
  } finally {
    canvas?.emitAfterChange?.()
  }
}

/** Whether a node is bypassed or muted. */
export function isOff(node) {
  return node.mode === BYPASSED || node.mode === 2
}

/** Whether a node was in a subgraph that is not there any more: ComfyUI tells such nodes nothing of their end. */
export function isGone({ graph }) {
  const root = graph?.rootGraph
  return Boolean(root) && graph !== root && root.subgraphs.get(graph.id) !== graph
}

/** Whether the open workflow has a loader of ours whose file is there. */
export function hasFiles(app) {
  return allNodes(app.rootGraph ?? app.graph).some((node) => {
    const file = LOADERS.has(node.comfyClass) && node.widgets?.find((widget) => widget.name === 'unet_name')
    const files = file && (typeof file.options?.values === 'function' ? file.options.values() : file.options?.values)
    return Array.isArray(files) && files.includes(file.value)
  })
}

/** Set SP Config's widgets to a report's plan; returns the node, or undefined where the workflow has none. */
export function applyPlan(app, plan) {
  const configs = allNodes(app.rootGraph ?? app.graph).filter((node) => node.comfyClass === CONFIG && !isOff(node))
  const node = configs.find((each) => each.selected) ?? configs[0]
  if (node !== undefined) setPlan(app, node, plan)
  return node
}

/** Set an SP Config's widgets to a report's plan. */
export function setPlan(app, node, plan) {
  const values = { mode: 'manual', weights: plan.weights }
  for (const axis of AXES) values[axis] = plan.degrees?.[axis] ?? 1
  for (const name of ['patches', 'warmup_steps']) values[name] = plan[name] // undefined without stages
  asOneEdit(app, () => {
    for (const widget of node.widgets ?? []) {
      if (values[widget.name] === undefined) continue
      widget.value = values[widget.name]
      widget.callback?.(widget.value)
    }
  })
  node.setDirtyCanvas?.(true, true)
}
