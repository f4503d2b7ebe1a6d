/* The doctor's part of the sidebar: the verdict, what to mend or to know, and folded away what is well. */

import { h, keyed, setAttribute, setText } from './dom.mjs'
import { copyText } from './exports.mjs'
import { seconds } from './figures.mjs'

/** The section, empty. */
export function makeDoctor(t) {
  const text = h('textarea', { readonly: '', rows: 6, hidden: '', 'aria-label': t('doctor.text') })
  const told = h('span', { class: 'pdit-quiet', role: 'status', 'data-testid': 'pdit-doctor-told' })
  const copy = h('button', { type: 'button', class: 'pdit-button', text: t('doctor.copy') })
  const section = h(
    'section',
    { class: 'pdit-doctor', 'data-testid': 'pdit-doctor' },
    h('h3', { text: t('panel.doctor') }),
    h('p', { class: 'pdit-quiet' }),
    h('ul', {}),
    h('details', { hidden: '' }, h('summary', {}), h('ul', {})),
    h('div', { class: 'pdit-buttons', hidden: '' }, copy, h('span', { class: 'pdit-quiet' }), told),
    text
  )
  copy.addEventListener('click', async () => {
    text.value = textOf(section.found, t)
    text.hidden = await copyText(text.value)
    setText(told, t(text.hidden ? 'doctor.copied' : 'doctor.refused'))
    if (!text.hidden) text.select()
  })
  return Object.assign(section, { found: {} })
}

/** Show what the doctor found, of the state that the server told. */
export function updateDoctor(section, doctor, t) {
  if (section.shown === JSON.stringify(doctor)) return
  section.shown = JSON.stringify(doctor)
  section.found = doctor
  const [, line, list, passed, foot, text] = section.children
  const findings = findingsOf(doctor, t)
  const notable = findings.filter((each) => each.verdict !== 'pass')
  const well = findings.filter((each) => each.verdict === 'pass')
  setText(line, verdictOf(doctor, notable, t))
  fill(list, notable, t)
  fill(passed.children[1], well, t)
  passed.hidden = well.length === 0
  setText(passed.firstChild, t('doctor.passed', { count: well.length }))
  foot.hidden = doctor.state !== 'done'
  setText(foot.children[1], whenOf(doctor, t))
  setText(foot.children[2], '')
  text.hidden = true
}

/* What fails comes first, then what to know, warnings among it, then what is well. */
function findingsOf(doctor, t) {
  if (doctor.state !== 'done') return []
  const warnings = Array.isArray(doctor.warnings) ? doctor.warnings : []
  const checks = Array.isArray(doctor.checks) ? doctor.checks : []
  const found = [
    ...warnings.map((seen) => ({ name: '', seen: t.said(String(seen)), verdict: 'note' })),
    ...checks.map((check) => ({ ...check, verdict: check.ok ? 'pass' : check.needed ? 'fail' : 'note' }))
  ]
  return found.sort((a, b) => Number(b.verdict === 'fail') - Number(a.verdict === 'fail'))
}

/** What the doctor found, in one line. */
export function doctorsVerdict(doctor, t) {
  return verdictOf(doctor, findingsOf(doctor, t).filter((each) => each.verdict !== 'pass'), t)
}

function verdictOf(doctor, notable, t) {
  if (doctor.state === 'failed') return String(doctor.message ?? '')
  if (doctor.state !== 'done') return t(`doctor.${doctor.state === 'running' ? 'running' : 'never'}`)
  if (!doctor.can_run) return t('doctor.bad')
  return notable.length ? t('doctor.noted', { count: notable.length }) : t('doctor.good')
}

function whenOf({ ended, took_s }, t) {
  if (!Number.isFinite(ended)) return ''
  const time = new Date(ended * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })
  return t('doctor.when', { time, took: seconds(took_s) })
}

function fill(list, findings, t) {
  keyed(
    list,
    findings,
    (each) => each.name || each.seen,
    () => h('li', {}, h('b', {}), h('span', {}), h('em', {})),
    (row, each) => {
      setAttribute(row, 'data-verdict', each.verdict)
      setText(row.children[0], `${t(`doctor.${each.verdict}`)} ${each.name || t('doctor.warning')}`)
      setText(row.children[1], each.seen ?? '')
      setText(row.children[2], each.verdict === 'pass' ? '' : (each.remedy ?? ''))
    }
  )
}

/* As a text for a report of a fault: the versions and every finding. */
function textOf(doctor, t) {
  const findings = findingsOf(doctor, t)
  const versions = Object.entries(doctor.versions ?? {}).map(([name, version]) => `${name} ${version}`)
  const lines = findings.map(({ verdict, name, seen, remedy }) => {
    const told = [seen, verdict === 'pass' ? '' : remedy].filter(Boolean).join('; ')
    return `${t(`doctor.${verdict}`)} ${[name, told].filter(Boolean).join(': ')}`
  })
  const notable = findings.filter((each) => each.verdict !== 'pass')
  return [verdictOf(doctor, notable, t), versions.join(', '), ...lines].filter(Boolean).join('\n')
}
