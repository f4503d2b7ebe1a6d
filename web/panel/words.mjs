/* The panel's words in the user's language: locales/LANGUAGE/main.json, `parallelDit`. English where one is missing.

   And the server's sentences, which are English: `makeSaid` finds the one that a text was made of, and says it in the
   user's language. messages.LANGUAGE.json has them, `{1}` for what stands in between. */

const OWN = 'parallelDit'
const LONGEST = 1000 // characters of a line that is looked up
const DEEPEST = 8 // prefixes before one another, as "a: b: c"
const REMEMBERED = 200 // texts, since the server sends the same again and again
const PLACE = /\{(\w+)\}/g

/** `said(text)`: the server's `text` by `messages`, a sentence of the user's language to each of the server's.

    Lines, and parts between "; ", ": " and ", ", are looked up by themselves where the whole is unknown; what nothing is
    known of stays as it is. */
export function makeSaid(messages) {
  const lines = Object.entries(messages).flatMap(([english, other]) => {
    const others = other.split('\n')
    return english.split('\n').map((each, place) => [each, others[place]])
  })
  const exact = new Map(lines)
  const shapes = lines
    .filter(([english]) => english.match(PLACE) && /[a-z]/i.test(english.replace(PLACE, '')))
    .map(([english, other]) => {
      const [names, literals] = [[...english.matchAll(PLACE)].map(([, name]) => name), english.split(/\{\w+\}/)]
      const escaped = literals.map((literal) => literal.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'))
      return { names, other, known: literals.join('').length, pattern: new RegExp(`^${escaped.join('(.*?)')}$`) }
    })
    .sort((one, two) => two.known - one.known)
  const whole = (text) => {
    if (exact.has(text)) return exact.get(text)
    for (const { names, other, pattern } of shapes) {
      const found = pattern.exec(text)
      if (found === null) continue
      const values = Object.fromEntries(names.map((name, place) => [name, line(found[place + 1])]))
      return other.replace(PLACE, (_, name) => values[name])
    }
    return undefined
  }
  const parts = (text, by, other) => {
    const each = text.split(by)
    if (each.length === 1) return undefined
    const told = each.map(line)
    return told.some((one, place) => one !== each[place]) ? told.join(other) : undefined
  }
  let depth = 0
  const prefixed = (text) => {
    const at = text.indexOf(': ')
    if (at < 0 || depth >= DEEPEST) return undefined
    depth += 1
    const rest = text.slice(at + 2)
    const told = line(rest)
    const found = told === rest ? undefined : `${line(text.slice(0, at))}：${told}`
    depth -= 1
    return found
  }
  const line = (text) => {
    if (text.length > LONGEST || !/[a-z]{2}/.test(text)) return text
    return whole(text) ?? parts(text, '; ', '；') ?? prefixed(text) ?? parts(text, ', ', '，') ?? text
  }
  const remembered = new Map()
  return (text) => {
    if (typeof text !== 'string') return text
    const told = remembered.get(text) ?? text.split('\n').map(line).join('\n')
    remembered.delete(text) // it is the newest now
    remembered.set(text, told)
    if (remembered.size > REMEMBERED) remembered.delete(remembered.keys().next().value)
    return told
  }
}

/** A sentence of the server's in the user's language, where `t` knows any but English. */
export const inWords = (t, text) => t.said?.(text) ?? text

/** `t(key, values)`: the text of a dotted key, `{name}` replaced by `values.name`. A key without text stays as it is. */
export function makeWords(translations, language) {
  const own = [translations?.[language], translations?.[language?.split('-')[0]], translations?.en]
    .map((each) => each?.[OWN])
    .filter((each) => each !== undefined)
  return (key, values = {}) => {
    const text = own.map((words) => find(words, key)).find((found) => typeof found === 'string') ?? key
    return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole))
  }
}

function find(words, key) {
  return key.split('.').reduce((inside, part) => inside?.[part], words)
}
