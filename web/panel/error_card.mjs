/* One card for what is refused and what fails: our sentence first, then the way to the node that it is about.

   Owns the card, and which sentence and node an error means. The workers' failures come here too, so that a death is
   told once; a node's error, which says the same and where, replaces them. Knows of ComfyUI what `app` gives it. */

import { h } from './dom.mjs'
import { allNodes, bypass, goTo, isOff, nodeById, packOf } from './workflow.mjs'
import { inWords } from './words.mjs'

const NAMED = /\(node ([\d:]+)\)/ // how our sentences name a node of the workflow
const REMOVE = /; remove (.*?)(?:, or |, and |$)/ // what they say is in the way
const SENTENCE = /^(.*?)(?:; |；)(.+)$/ // a reason and its remedy
const DISMISS = '[data-testid="error-overlay-dismiss"]'
const OURS = 'SPConfig' // by whose class the pack's folder is known

/* Whether something of a node goes on without it: else what reads it lacks an input. */
const passes = ({ inputs = [], outputs = [] }) => outputs.some(({ type }) => inputs.some((input) => input.type === type))

export class ErrorCard {
  /** `app` is ComfyUI's; `t` the words. Nothing is in the page until something fails. */
  constructor(app, t) {
    Object.assign(this, { app, t, root: null, about: null })
  }

  /** ComfyUI's `execution_error` event. True when it is told here: an error of our code, on whichever node.
      `here`: whether the prompt was of the open workflow, whose node of that number it is then. */
  failed({ node_id, node_type, exception_message, traceback }, here = true) {
    const node = here ? nodeById(this.app, node_id) : undefined
    if (!this._isOurs(node_type) && !this._ran(traceback)) {
      if (this.about === 'node') this.hide() // ComfyUI tells of the new error, which the card of an older one would hide
      return false
    }
    this._show({ about: 'node', title: this._title(node, node_type), text: String(exception_message ?? ''), node, here })
    return true
  }

  /** What ComfyUI answers to a queued prompt, for the first node of ours whose values it refuses. */
  refused(answer) {
    const errors = Object.entries(answer?.node_errors ?? {})
    const found = errors.find(([, each]) => this._isOurs(each?.class_type) && each.errors?.length)
    if (found === undefined) return false
    const [id, { class_type, errors: reasons }] = found
    const node = nodeById(this.app, id)
    const text = reasons.map((reason) => this._sentence(reason)).join('\n')
    this._show({ about: 'node', title: this._title(node, class_type), text, node })
    return true
  }

  /** Workers that failed, unless the error of a node is shown, which says it too. */
  workersFailed(devices, text) {
    if (this.about === null) this._show({ about: devices, title: this.t('poolFailed'), text })
  }

  /** The workers of these devices are well again. */
  workersMended(devices) {
    if (this.about === devices) this.hide()
  }

  /** Take the card away: something new was tried, or it was read. */
  hide() {
    this.root?.remove()
    this.root = this.about = null
  }

  _show({ about, title, text, node, here = true }) {
    this.hide()
    const { t, app } = this
    const [sentence, ...details] = text.trim().split('\n')
    const told = inWords(t, sentence)
    const [, reason, remedy] = SENTENCE.exec(told) ?? [told, told, '']
    const named = here ? this._named(sentence, node) : undefined
    const meant = named ?? node
    const helps = meant && REMOVE.test(sentence) && !isOff(meant) && (named ? passes(meant) : this._passesModel(meant))
    const button = (key, onclick) => h('button', { type: 'button', class: 'pdit-button', text: t(`card.${key}`), onclick })
    const bypassing = helps
      ? button('bypass', () => {
          bypass(app, meant)
          this._say(t('card.bypassed', { node: this._name(meant) }))
          bypassing.remove()
        })
      : null
    this.told = h('p', { class: 'pdit-quiet', role: 'status' })
    this.root = h(
      'div',
      { class: 'pdit pdit-card', role: 'alert', 'data-testid': 'pdit-error-card', 'data-of-node': about === 'node' },
      h('h3', { text: title }),
      h('p', { class: 'pdit-reason', text: reason }),
      remedy ? h('p', { text: remedy[0].toUpperCase() + remedy.slice(1) }) : null,
      details.length ? h('p', { class: 'pdit-quiet', text: inWords(t, details.join('\n')) }) : null,
      this.told,
      h(
        'div',
        { class: 'pdit-buttons' },
        meant ? button('goTo', () => goTo(app, meant)) : null,
        bypassing,
        button('close', () => this._close())
      )
    )
    this.root.addEventListener('keydown', (event) => event.key === 'Escape' && this._close())
    this.about = about
    const { activeElement: focused, body } = document
    body.append(this.root)
    if (focused === body || focused === app.canvas?.canvas) this.root.querySelector('button').focus()
  }

  /* ComfyUI's own card of the same error lies below ours, hidden; it goes too. */
  _close() {
    this.hide()
    document.querySelector(DISMISS)?.click()
  }

  _say(text) {
    this.told.textContent = text
  }

  /* The node that a sentence names, by its number or by what it says to remove, where the open workflow has it. */
  _named(sentence, node) {
    const [, id] = NAMED.exec(sentence) ?? []
    if (id !== undefined) return nodeById(this.app, id)
    const [, clause] = REMOVE.exec(sentence) ?? []
    if (clause === undefined) return undefined
    const names = (each) => [each.comfyClass, each.constructor?.nodeData?.display_name].filter(Boolean)
    const there = [node, ...allNodes(this.app.rootGraph ?? this.app.graph)].filter((each) => each && !isOff(each))
    return there.find((each) => names(each).some((name) => clause.includes(name)))
  }

  /* A node of others that changes a MODEL on its way: without it the MODEL arrives unchanged. */
  _passesModel(node) {
    return !this._isOurs(node.comfyClass) && (node.outputs ?? []).some((output) => output.type === 'MODEL')
  }

  _name(node) {
    return node.title || node.comfyClass
  }

  _title(node, kind) {
    return this.t('card.title', { node: node ? this._name(node) : kind })
  }

  _isOurs(kind) {
    const types = globalThis.LiteGraph?.registered_node_types ?? {}
    const pack = (name) => packOf({ constructor: types[name] })
    return pack(OURS) !== '' && pack(kind) === pack(OURS)
  }

  /* Whether an error was raised by code of ours below a node of someone else's, as by KSampler with a parallel MODEL. */
  _ran(traceback) {
    const folder = packOf({ constructor: globalThis.LiteGraph?.registered_node_types?.[OURS] })
    const last = Array.isArray(traceback) ? traceback.join('\n').split('File "').at(-1) : ''
    return folder !== '' && last.replaceAll('\\', '/').includes(`/${folder}/`)
  }

  _sentence({ type, message, details, extra_info }) {
    const { t } = this
    const name = extra_info?.input_name ?? details
    const [, limits] = extra_info?.input_config ?? []
    const value = extra_info?.received_value
    if (type === 'custom_validation_failed') return String(details).replace(/^\w+ - /, '')
    if (type === 'value_smaller_than_min') return t('card.small', { name, value, limit: limits?.min })
    if (type === 'value_bigger_than_max') return t('card.big', { name, value, limit: limits?.max })
    if (type === 'value_not_in_list') {
      const ofFile = /\.gguf$/i.test(value) ? 'card.gguf' : 'card.noFile'
      return t(name === 'unet_name' ? ofFile : 'card.notInList', { name, value })
    }
    if (type === 'required_input_missing') return t('card.missing', { name })
    return [message, details].filter(Boolean).join(': ')
  }
}
