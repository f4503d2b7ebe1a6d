/* The first run in four steps: Doctor, files, Run, result. It goes away once they are done or it is dismissed, for
   good: ComfyUI keeps that with the user's settings. */

import { h, setAttribute, setText } from './dom.mjs'
import { doctorsVerdict } from './doctor.mjs'

const STEPS = ['doctor', 'files', 'run', 'result']

/**
 * The section. `first` is what it asks of its surroundings: `isOver()` and `setOver()` are the remembered end,
 * `hasFiles()` says whether the open workflow has a loader whose file is there, `go(step)` does what a step's button says.
 */
export function makeChecklist(t, first) {
  const rows = STEPS.map((step) =>
    h(
      'li',
      { 'data-step': step },
      h('span', { class: 'pdit-tick', 'aria-hidden': 'true' }),
      h('span', {}, h('b', { text: t(`first.${step}`) }), h('span', { class: 'pdit-quiet', text: t(`first.tips.${step}`) })),
      h('button', {
        type: 'button',
        class: 'pdit-button',
        text: t(`first.go.${step}`),
        onclick: () => {
          if (step === 'result') section.seen = true
          first.go(step)
          section.again?.()
        }
      })
    )
  )
  const section = h(
    'section',
    { class: 'pdit-first', 'data-testid': 'pdit-first', hidden: '' },
    h('h3', { text: t('first.title') }),
    h('ol', {}, ...rows),
    h('button', {
      type: 'button',
      class: 'pdit-button',
      text: t('first.dismiss'),
      onclick: () => {
        first.setOver()
        section.hidden = true
      }
    })
  )
  return Object.assign(section, { first, seen: false })
}

/** Tick what is done, by the state that the server told; nothing is shown before that is known. */
export function updateChecklist(section, store, t) {
  const { first } = section
  section.again = () => updateChecklist(section, store, t)
  if (store.state === null || first === undefined || first.isOver()) return void (section.hidden = true)
  const ran = store.newest('denoise', 'denoise_list') !== undefined
  const { doctor } = store.state
  const done = {
    doctor: doctor?.state === 'done' && doctor.can_run === true,
    files: ran || first.hasFiles(),
    run: ran,
    result: ran && section.seen
  }
  const told = doctor?.state && doctor.state !== 'never' ? doctorsVerdict(doctor, t) : ''
  const next = STEPS.find((step) => !done[step])
  if (next === undefined) first.setOver()
  section.hidden = next === undefined
  for (const row of section.querySelectorAll('li')) {
    const { step } = row.dataset
    setAttribute(row, 'data-done', done[step] ? 'true' : null)
    setAttribute(row, 'aria-current', step === next ? 'step' : null)
    setText(row.firstChild, done[step] ? '✓' : '○')
    const tip = row.children[1].lastChild
    setText(tip, (step === 'doctor' && told) || t(`first.tips.${step}`))
    tip.hidden = done[step] && !(step === 'doctor' && told) // room for what comes below the list
    row.lastChild.hidden = done[step] || (step === 'result' && !ran)
    row.lastChild.disabled = step === 'doctor' && doctor?.state === 'running'
  }
}
