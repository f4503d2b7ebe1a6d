/* A report to a file, or to Perfetto: PNG of what is drawn, the JSON itself, and a Chrome trace of its ranks. */

const PERFETTO = 'https://ui.perfetto.dev'
const PING_MS = 100
const GIVE_UP_MS = 30000

/** Chrome's trace format: a track a rank, a slice for each step's compute, communication and idle. Times in µs. */
export function chromeTrace(view) {
  const events = [
    { ph: 'M', pid: 0, name: 'process_name', args: { name: `Parallel DiT ${view.plan?.name ?? ''}`.trim() } }
  ]
  for (const rank of view.ranks) {
    events.push({
      ph: 'M',
      pid: 0,
      tid: rank.rank,
      name: 'thread_name',
      args: { name: `rank ${rank.rank} ${rank.device}` }
    })
    rank.begin?.forEach((begin, step) => {
      let at = begin
      for (const name of ['compute', 'communication', 'idle']) {
        const length = rank[name][step]
        if (length > 0)
          events.push({
            ph: 'X',
            pid: 0,
            tid: rank.rank,
            name,
            cat: 'step',
            ts: at * 1e6,
            dur: length * 1e6,
            args: { step: step + 1 }
          })
        at += length
      }
    })
  }
  return {
    traceEvents: events,
    displayTimeUnit: 'ms',
    otherData: { note: 'within a step the sums are measured, not their order' }
  }
}

/** Offer a blob as a file. */
export function download(name, blob) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10000)
}

/** A blob of a value as JSON. */
export function jsonBlob(value) {
  return new Blob([JSON.stringify(value)], { type: 'application/json' })
}

/** One PNG of some canvases, one above the other, on a background. */
export function pngOf(canvases, background) {
  const drawn = canvases.filter((canvas) => canvas.width > 0 && canvas.height > 0 && canvas.offsetParent !== null)
  const sheet = document.createElement('canvas')
  sheet.width = Math.max(1, ...drawn.map((canvas) => canvas.width))
  sheet.height = Math.max(
    1,
    drawn.reduce((sum, canvas) => sum + canvas.height + 8, 0)
  )
  const brush = sheet.getContext('2d')
  brush.fillStyle = background
  brush.fillRect(0, 0, sheet.width, sheet.height)
  let y = 0
  for (const canvas of drawn) {
    brush.drawImage(canvas, 0, y)
    y += canvas.height + 8
  }
  return new Promise((resolve) => sheet.toBlob(resolve, 'image/png'))
}

/** Open Perfetto in a new tab and hand it the trace, from page to page: nothing is uploaded. False when blocked. */
export function openInPerfetto(trace, title) {
  const tab = window.open(PERFETTO)
  if (!tab) return false
  const timer = setInterval(() => tab.postMessage('PING', PERFETTO), PING_MS)
  const end = () => {
    clearInterval(timer)
    window.removeEventListener('message', answer)
  }
  const answer = ({ source, origin, data }) => {
    if (source !== tab || origin !== PERFETTO || data !== 'PONG') return
    end()
    jsonBlob(trace)
      .arrayBuffer()
      .then((buffer) => tab.postMessage({ perfetto: { buffer, title } }, PERFETTO))
  }
  window.addEventListener('message', answer)
  setTimeout(end, GIVE_UP_MS)
  return true
}
