/* The panel's words in the user's language: locales/LANGUAGE/main.json, `parallelDit`. English where one is missing. */

const OWN = 'parallelDit'

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
