/* Tune, in the sidebar: which work plans are to be tried for, how long, and what was found. */

import { h, setAttribute, setText } from './dom.mjs'
import { seconds } from './figures.mjs'

const NUMBERS = { width: [16, 16384], height: [16, 16384], frames: [1, 4096], text_tokens: [1, 8192], batch: [1, 64], seconds: [1, 3600] }
const USUAL = { width: 1024, height: 1024, text_tokens: 512, batch: 1, seconds: 60 }

/** The section, hidden until a model is loaded. `actions.run(name, values)` does the buttons' work. */
export function makeTune(t, actions) {
  const rows = Object.entries(NUMBERS).map(([name, [min, max]]) =>
    h('label', { 'data-name': name }, h('span', { text: t(`tune.${name}`) }), h('input', { type: 'number', min, max, 'aria-label': t(`tune.${name}`) }))
  )
  const guided = h('input', { type: 'checkbox', 'aria-label': t('tune.guided') })
  const inputs = () => Object.fromEntries(rows.map((row) => [row.dataset.name, row.lastChild]))
  const section = h(
    'section',
    { class: 'pdit-doctor pdit-tune', 'data-testid': 'pdit-tune', hidden: '' },
    h('h3', { text: t('panel.tune') }),
    h('p', { class: 'pdit-quiet' }),
    h(
      'details',
      {},
      h('summary', { text: t('tune.work') }),
      h('div', { class: 'pdit-fields' }, ...rows, h('label', {}, h('span', { text: t('tune.guided') }), guided))
    ),
    h('div', { class: 'pdit-buttons' }, button('tune', t, () => actions.run('tune', values())), button('stop_tuning', t, () => actions.run('stop_tuning'))),
    h('p', { role: 'status', 'data-testid': 'pdit-tuned' })
  )
  function values() {
    const found = Object.entries(inputs()).map(([name, input]) => [name, input.value.trim()])
    return { ...Object.fromEntries(found.filter(([, text]) => text !== '')), guided: guided.checked }
  }
  return Object.assign(section, { inputs: inputs(), guided, of: '' })
}

function button(name, t, onclick) {
  return h('button', { type: 'button', class: 'pdit-button', 'data-action': name, title: t(`panel.tips.${name}`), text: t(`panel.${name}`), onclick })
}

/** Show what the server's state says of it; an older server says nothing. */
export function updateTune(section, state, t) {
  const { of, ...told } = state?.tune ?? {}
  const [, model, , buttons, line] = section.children
  const running = told.state === 'running'
  section.hidden = !of && !['running', 'done', 'failed'].includes(told.state)
  fill(section, of)
  setText(model, of ? (of.why_not ? t.said(of.why_not) : t('tune.of', { model: of.model })) : '')
  const [tune, stop] = buttons.children
  tune.disabled = state?.action !== null || !of || Boolean(of.why_not)
  setAttribute(tune, 'aria-busy', running ? 'true' : null)
  stop.hidden = !running
  const other = told.model !== undefined && of && told.model !== of.model // of a model that ran before
  setText(line, other ? `${told.model}: ${textOf(told, t)}` : textOf(told, t))
}

/* The fields take what was sampled last, once for each such work: what a user wrote stays. */
function fill(section, of) {
  const now = JSON.stringify(of ?? '')
  if (!of || section.of === now) return
  section.of = now
  for (const [name, input] of Object.entries(section.inputs)) {
    if (name === 'seconds' && input.value) continue
    input.value = of[name] ?? USUAL[name] ?? ''
  }
  section.inputs.frames.parentElement.hidden = of.frames === undefined
  section.guided.checked = of.guided === true
}

function textOf(told, t) {
  if (told.state === 'running') return t('tune.running', { doing: t.said(String(told.doing ?? '')) })
  if (told.state === 'failed') return t.said(String(told.message ?? ''))
  if (told.state !== 'done') return ''
  const took = t('tune.took', { copies: told.copies, time: seconds(told.took_s) })
  return `${t.said(String(told.line ?? ''))} (${t.said(String(told.work ?? ''))}; ${took})`
}
