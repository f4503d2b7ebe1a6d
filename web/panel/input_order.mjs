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
  'step_cache'
]

/** Draw a node's widgets in `ORDER`, those that it does not name behind; both renderers draw them as they lie there. */
export function orderInputs(node) {
  const schema = new Map((node.widgets ?? []).map((widget, at) => [widget.name, at]))
  const place = (names) => (widget) => {
    const at = names(widget.name)
    return at === undefined || at < 0 ? Infinity : at
  }
  const saved = place((name) => schema.get(name))
  const shown = place((name) => ORDER.indexOf(name))
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

/* In place, since the renderer watches this very array; a sort keeps equals as they are. */
function arrange(node, placeOf) {
  const sorted = [...(node.widgets ?? [])].sort((a, b) => {
    const [first, second] = [placeOf(a), placeOf(b)]
    return first === second ? 0 : first - second
  })
  if (sorted.some((widget, at) => node.widgets[at] !== widget)) node.widgets.splice(0, sorted.length, ...sorted)
}
