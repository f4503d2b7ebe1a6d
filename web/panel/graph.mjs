/* What the panel does to the graph in the editor: the run again on one device, another plan in SP Config, and where
   the canvas looks.

   `app` is ComfyUI's, given by parallel_dit.js. A refusal is an Error whose text is a key of the words. */

import { AXES } from './mesh.mjs'
import { CONFIG, nodeById, setPlan } from './workflow.mjs'

const ONE = Object.fromEntries(AXES.map((axis) => [axis, 1]))
const END = 'parallel-dit-measure' // of the node that has the sampler run, in what is queued alone
const SAMPLERS = ['ParallelSampler', 'ParallelFluxSampler']
const AROUND = { side: 24, top: 130 } // pixels that stay free of the graph; ComfyUI's own buttons are at the top

/** The id that a graph is known by on the server, of a node or of all. */
export function graphId(graph) {
  return (graph?.rootGraph ?? graph)?.id
}

/** Whether something of the server, by its `node` and `graph`, is of this node of the editor. */
export function isOf(node, number, graph) {
  return String(number).split(':').at(-1) === String(node.id) && graph === graphId(node.graph)
}

/** Queue what a run sampled once more, on one device: nothing behind its sampler, so that no picture is made. */
export async function measureOneDevice(app, entry) {
  const { output, workflow } = await promptOf(app, entry)
  const kept = upTo(output, entry.node_id)
  const config = kept[configOf(kept)].inputs
  Object.assign(config, ONE, { mode: 'manual' }, config.weights === 'sharded' ? { weights: 'replicated' } : {})
  kept[END] = { class_type: 'PreviewAny', inputs: { source: [entry.node_id, 1] }, _meta: { title: END } }
  await app.api.queuePrompt(0, { output: kept, workflow })
}

/** Set the SP Config that a run had to the plan that is suggested for it. */
export async function applySuggestion(app, entry) {
  const { output } = await promptOf(app, entry)
  setPlan(app, nodeById(app, configOf(upTo(output, entry.node_id))), entry.summary.suggestion)
}

/** Show the whole graph beside the sidebar, below which ComfyUI's own view of it would lie. */
export function showBeside(app, sidebar) {
  const { canvas, ds } = app.canvas
  const page = canvas.getBoundingClientRect()
  const left = Math.max(0, (sidebar?.getBoundingClientRect().right ?? 0) - page.left) + AROUND.side
  const nodes = app.graph.nodes
  const least = [0, 1].map((axis) => Math.min(...nodes.map((node) => node.pos[axis])))
  const most = [0, 1].map((axis) => Math.max(...nodes.map((node) => node.pos[axis] + node.size[axis])))
  const room = [page.width - left - AROUND.side, page.height - AROUND.top - AROUND.side]
  const scales = room.map((pixels, axis) => pixels / (most[axis] - least[axis]))
  ds.scale = Math.max(0.1, Math.min(1, ...scales))
  ds.offset = [left / ds.scale - least[0], AROUND.top / ds.scale - least[1]]
  app.canvas.setDirty(true, true)
}

/* What the editor would queue now, if the run is of this graph and its sampler is still there. */
async function promptOf(app, entry) {
  if (entry.graph !== graphId(app.graph)) throw new Error('graph.other')
  const prompt = await app.graphToPrompt()
  if (!SAMPLERS.includes(prompt.output[entry.node_id]?.class_type)) throw new Error('graph.gone')
  return prompt
}

/* A node of a prompt with all that it depends on. */
function upTo(prompt, id, kept = {}) {
  if (kept[id] || !prompt[id]) return kept
  kept[id] = structuredClone(prompt[id])
  for (const value of Object.values(prompt[id].inputs ?? {}))
    if (Array.isArray(value) && value.length === 2) upTo(prompt, String(value[0]), kept)
  return kept
}

function configOf(prompt) {
  const found = Object.keys(prompt).filter((id) => prompt[id].class_type === CONFIG)
  if (found.length !== 1) throw new Error('graph.noConfig')
  return found[0]
}
