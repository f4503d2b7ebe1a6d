/* Numbers as people read them. */

/** The middle of some numbers; NaN of none. */
export function median(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b)
  if (sorted.length === 0) return NaN
  const middle = sorted.length >> 1
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2
}

/** The largest of some numbers, however many; `otherwise` of none. */
export function largest(values, otherwise = 0) {
  return values.reduce((most, value) => (value > most ? value : most), otherwise)
}

/** Three digits: 41 µs, 0.41 s, 12.3 s, 2 min 5 s. */
export function seconds(value) {
  if (!Number.isFinite(value)) return '–'
  if (value === 0) return '0 s'
  const whole = Math.round(value) // before it is divided: 119.7 s are two minutes
  if (value >= 60) return `${Math.floor(whole / 60)} min ${whole % 60} s`
  if (value >= 0.1) return `${value.toPrecision(value >= 10 ? 3 : 2)} s`
  if (value >= 0.01) return `${Math.round(value * 1e3)} ms`
  if (value >= 1e-4) return `${(value * 1e3).toPrecision(2)} ms`
  return `${Math.round(value * 1e6)} µs`
}

/** Two times to compare, in one unit: 97 ms and 122 ms, not 97 ms and 0.12 s. */
export function alike(one, other) {
  const both = [one, other]
  const small = both.some((value) => value < 0.1) && both.every((value) => value >= 0.01 && value < 1)
  return both.map((value) => (small ? `${Math.round(value * 1e3)} ms` : seconds(value)))
}

/** Whole seconds, for what is only estimated: 4 s, 2 min 5 s. */
export function roughly(value) {
  return value < 59.5 ? `${Math.round(value)} s` : seconds(Math.max(60, Math.round(value)))
}

/** Round places between two on an axis, at most `count` steps of 1, 2 or 5 times a power of ten `apart`. */
export function axisMarks(from, to, count) {
  const least = (to - from) / count
  const power = 10 ** Math.floor(Math.log10(least))
  const apart = power * [1, 2, 5, 10].find((step) => step * power >= least * (1 - 1e-9))
  const [first, last] = [Math.ceil(from / apart - 1e-9), Math.floor(to / apart + 1e-9)]
  return { apart, marks: Array.from({ length: last - first + 1 }, (_, at) => (first + at) * apart) }
}

/** A time on an axis whose marks are `apart` seconds from each other: no two marks read alike. */
export function axisTime(value, apart) {
  const [unit, factor] = value + apart >= 0.1 ? ['s', 1] : value + apart >= 1e-4 ? ['ms', 1e3] : ['µs', 1e6]
  const digits = Math.min(6, Math.max(0, Math.ceil(1 - Math.log10(apart * factor))))
  return value === 0 ? '0 s' : `${(value * factor).toFixed(digits)} ${unit}`
}

/** 640 B, 41 kB, 512 MB, 23.6 GB; powers of ten, as reports and drivers have them. */
export function bytes(value) {
  if (!Number.isFinite(value)) return '–'
  if (value >= 1e9) return `${(value / 1e9).toFixed(value >= 1e11 ? 0 : 1)} GB`
  if (value >= 1e6) return `${Math.round(value / 1e6)} MB`
  return value >= 1e3 ? `${Math.round(value / 1e3)} kB` : `${Math.round(value)} B`
}

/** 3 %, 0.4 %. */
export function percent(share) {
  if (!Number.isFinite(share)) return '–'
  if (share === 0) return '0 %'
  return `${(share * 100).toFixed(share < 0.0095 ? 1 : 0)} %`
}

/** 1.5, 12: how many times, as it is said. */
export function ratio(factor) {
  return Number.isFinite(factor) ? factor.toFixed(factor >= 9.95 ? 0 : factor < 1.1 ? 2 : 1) : '–'
}

/** 1.86×. */
export function times(factor) {
  return Number.isFinite(factor) ? `${factor.toFixed(2)}×` : '–'
}

/** 4.7e-7, 0; what was not measured is a dash. */
export function relativeError(value) {
  return Number.isFinite(value) ? (value === 0 ? '0' : value.toExponential(1)) : '–'
}
