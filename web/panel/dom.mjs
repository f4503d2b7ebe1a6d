/* Making and updating elements in place. Owns no state: what is shown is the callers'. */

const SVG = 'http://www.w3.org/2000/svg'
const SVG_TAGS = new Set(['svg', 'g', 'circle', 'line', 'path', 'rect', 'text', 'title', 'defs', 'marker'])

/** An element with attributes (`on*` are listeners, `text` its text) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (name === 'text') element.textContent = value
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value)
  }
  element.append(...children.filter((child) => child !== null && child !== undefined))
  return element
}

/** Set an element's text, touching the page only when it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text
}

/** Set or, for null, remove an attribute, touching the page only when it differs. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name)
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value)
  }
}

/**
 * Make `parent` hold one element for each item, in order. Elements are kept by the item's key, of several alike by their
 * order too, so that what is there stays there: no flicker, and the keyboard's focus is not lost.
 */
export function keyed(parent, items, keyOf, make, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]))
  const times = new Map()
  items.forEach((item, index) => {
    const said = String(keyOf(item, index))
    const before = times.get(said) ?? 0
    times.set(said, before + 1)
    const key = before ? `${said} ${before}` : said
    let element = kept.get(key)
    if (element === undefined) {
      element = make(item)
      element.dataset.key = key
    }
    kept.delete(key)
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null)
    update(element, item)
  })
  kept.forEach((element) => element.remove())
}

/** The value of one of ComfyUI's colours as it is now, in either theme. */
export function themeColour(element, name, otherwise) {
  return getComputedStyle(element).getPropertyValue(name).trim() || otherwise
}

/** Call `redraw` when ComfyUI's theme changes; returns what ends that. */
export function onThemeChange(redraw) {
  const observer = new MutationObserver(redraw)
  for (const element of [document.documentElement, document.body])
    observer.observe(element, { attributes: true, attributeFilter: ['class', 'style'] })
  return () => observer.disconnect()
}
