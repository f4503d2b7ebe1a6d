/* What a node of ours says while it works: in a box that it has anyway. ComfyUI's own text makes a node grow over the
   one below. What a loader says of its plan stands on the SP Config that it reads: a plan is told once. */

import { h, setText } from './dom.mjs'
import { graphId } from './graph.mjs'
import { nodeById } from './workflow.mjs'

const BOXES = new WeakMap() // node -> what shows a text on it

/** Let texts for a node be shown by `show(text)`. */
export function showTextsOf(node, show) {
  BOXES.set(node, show)
}

/** A line at the top of a node's box that stands for what is below it while the node works, until it has a result. */
export function addLiveLine(node, box) {
  const line = h('div', { class: 'pdit-said', 'data-testid': 'pdit-said' })
  box.prepend(line)
  showTextsOf(node, (text) => setText(line, text))
  const before = node.onExecuted
  node.onExecuted = function (...all) {
    setText(line, '')
    return before?.apply(this, all)
  }
}

/** Show a text that the server sent for a node of a graph; nowhere when another workflow is open, it has no such node,
    or the node no box. */
export function showText(app, { node_id, graph }, text) {
  if (graph !== undefined && graph !== graphId(app.graph)) return
  const node = nodeById(app, node_id)
  const show = BOXES.get(node) ?? BOXES.get(configOf(node))
  show?.(text)
}

/* Runs that ended without a result leave their last text: the next prompt takes it away. */
export function clearTexts(nodes) {
  for (const node of nodes) if (node.comfyClass !== 'SPConfig') BOXES.get(node)?.('')
}

function configOf(node) {
  const slot = (node?.inputs ?? []).findIndex((input) => input.name === 'sp_config')
  return slot < 0 ? undefined : node.getInputNode?.(slot)
}
