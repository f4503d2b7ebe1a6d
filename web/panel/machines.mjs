/* The further machines that have joined, in the sidebar: their devices and versions, and whether they have the files. */

import { h, keyed, setAttribute, setText } from './dom.mjs'

/** The section, hidden until a machine has joined. */
export function makeMachines(t) {
  const list = h('ul', {})
  return h('section', { class: 'pdit-doctor', 'data-testid': 'pdit-machines' }, h('h3', { text: t('panel.machines') }), list)
}

/** Shows what the server's state says of machines; an older server says nothing. */
export function updateMachines(section, machines, t) {
  section.hidden = machines.length === 0
  keyed(
    section.children[1],
    machines,
    (machine) => machine.name,
    () => h('li', {}, h('b', {}), h('span', {}), h('em', {})),
    (row, machine) => {
      const problems = machine.files.filter((file) => file.problem)
      const good = machine.files.filter((file) => !file.problem).map((file) => `✓ ${file.name}`)
      setAttribute(row, 'data-verdict', problems.length ? 'fail' : 'pass')
      setText(row.children[0], `${machine.name}: ${machine.devices.join(', ')}`)
      setText(row.children[1], [machine.versions.join(', '), ...good].join(' · '))
      setText(row.children[2], problems.map((file) => `✗ ${file.problem}`).join('\n'))
    }
  )
}
