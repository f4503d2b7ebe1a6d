/* The further machines that have joined, in the sidebar: their devices and versions, and whether they have the files;
   where they may join, and the button that closes that. */

import { h, keyed, setAttribute, setText } from './dom.mjs'

/** The section, hidden until an address is offered. `actions.run(name)` does the button's work. */
export function makeMachines(t, actions) {
  const name = 'stop_listening'
  return h(
    'section',
    { class: 'pdit-doctor', 'data-testid': 'pdit-machines' },
    h('h3', { text: t('panel.machines') }),
    h('ul', {}),
    h('p', { class: 'pdit-quiet' }),
    h('button', {
      type: 'button',
      class: 'pdit-button',
      'data-action': name,
      title: t(`panel.tips.${name}`),
      text: t(`panel.${name}`),
      onclick: () => actions.run(name)
    })
  )
}

/** Shows what the server's state says of machines and addresses; an older server says nothing. */
export function updateMachines(section, state, t) {
  const [, list, listening, stop] = section.children
  const machines = state?.machines ?? []
  const offered = state?.offered ?? []
  section.hidden = machines.length + offered.length === 0
  listening.hidden = stop.hidden = offered.length === 0
  setText(listening, offered.length ? t('panel.listening', { addresses: offered.join(', ') }) : '')
  stop.disabled = state?.action !== null
  keyed(
    list,
    machines,
    (machine) => machine.name,
    () => h('li', {}, h('b', {}), h('span', {}), h('em', {})),
    (row, machine) => {
      const problems = machine.files.filter((file) => file.problem)
      const good = machine.files.filter((file) => !file.problem).map((file) => `✓ ${file.name}`)
      setAttribute(row, 'data-verdict', problems.length ? 'fail' : 'pass')
      setText(row.children[0], `${machine.name}: ${machine.devices.join(', ')}`)
      setText(row.children[1], [machine.versions.join(', '), ...good].join(' · '))
      setText(row.children[2], problems.map((file) => `✗ ${t.said(file.problem)}`).join('\n'))
    }
  )
}
