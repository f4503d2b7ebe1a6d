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
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`
  if (value >= 0.1) return `${value.toPrecision(value >= 10 ? 3 : 2)} s`
  if (value >= 0.01) return `${Math.round(value * 1e3)} ms`
  if (value >= 1e-4) return `${(value * 1e3).toPrecision(2)} ms`
  return `${Math.round(value * 1e6)} µs`
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
  return `${(share * 100).toFixed(share < 0.0095 ? 1 : 0)} %`
}

/** 1.86×. */
export function times(factor) {
  return Number.isFinite(factor) ? `${factor.toFixed(2)}×` : '–'
}

/** 4.7e-7, 0; what was not measured is a dash. */
export function relativeError(value) {
  return Number.isFinite(value) ? (value === 0 ? '0' : value.toExponential(1)) : '–'
}
