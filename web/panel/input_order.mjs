/* SP Config's inputs in the order a person fills them. `widgets_values` of saved workflows go by place, so whatever
   saves or loads a node meets the widgets in the schema's order. */

const ORDER = [
  'mode',
  'devices',
  'machines',
  'ulysses',
  'ring',
  'cfg',
  'data',
  'pipefusion',
  'patches',
  'warmup_steps',
  'weights',
  'lora',
  'compiled',
  'step_cache',
  'loop',
  'attention',
  'exchange',
  'tries',
  'shares',
  'plans'
]

/** Draw a node's widgets in `ORDER`, those that it does not name where they are; both renderers draw them as they lie. */
export function orderInputs(node) {
  const schema = (node.widgets ?? []).map((widget) => widget.name)
  const saved = (widget) => schema.indexOf(widget.name)
  const shown = (widget) => ORDER.indexOf(widget.name)
  arrange(node, shown)
  for (const name of ['configure', 'serialize']) {
    const method = node[name]
    node[name] = function (...all) {
      arrange(this, saved)
      try {
        return method.apply(this, all)
      } finally {
        arrange(this, shown)
      }
    }
  }
}

/* In place, since the renderer watches this very array. Ours take turns in the places that ours have. */
function arrange(node, placeOf) {
  const isOurs = (widget) => ORDER.includes(widget.name)
  const widgets = node.widgets ?? []
  const ours = widgets.filter(isOurs).sort((a, b) => placeOf(a) - placeOf(b))
  const sorted = widgets.map((widget) => (isOurs(widget) ? ours.shift() : widget))
  if (sorted.some((widget, at) => node.widgets[at] !== widget)) node.widgets.splice(0, sorted.length, ...sorted)
}
