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

const HEAD = { title: 26, line: 17, legend: 20, caption: 16, edge: 10 } // heights, in the page's pixels

/**
 * One PNG of canvases as they are drawn, below each other, each under its caption: `parts` are [caption, canvas]. Above
 * them the title, lines of text, and the legend, [text, colour] each.
 */
export function pngOf({ title, lines, legend, parts, background, text }) {
  const scale = globalThis.devicePixelRatio || 1
  const drawn = parts.filter(([, { width, height, offsetParent }]) => width > 0 && height > 0 && offsetParent !== null)
  const told = lines.filter(Boolean)
  const head = HEAD.edge + HEAD.title + told.length * HEAD.line + HEAD.legend
  const heightOf = ([caption, canvas]) => (caption ? HEAD.caption : 0) + canvas.height / scale + HEAD.edge
  const sheet = document.createElement('canvas')
  const width = Math.max(480, ...drawn.map(([, canvas]) => canvas.width / scale))
  sheet.width = Math.round(width * scale)
  sheet.height = Math.round(drawn.reduce((sum, part) => sum + heightOf(part), head + HEAD.edge) * scale)
  const brush = sheet.getContext('2d')
  brush.scale(scale, scale)
  brush.fillStyle = background
  brush.fillRect(0, 0, sheet.width, sheet.height)
  brush.textBaseline = 'middle'
  const write = (words, font, x, y) => {
    brush.fillStyle = text
    brush.font = `${font} sans-serif`
    brush.fillText(words, x, y, width - x - HEAD.edge)
  }
  let y = HEAD.edge
  write(`Parallel DiT · ${title}`, '600 16px', HEAD.edge, y + HEAD.title / 2)
  y += HEAD.title
  for (const line of told) {
    write(line, '12px', HEAD.edge, y + HEAD.line / 2)
    y += HEAD.line
  }
  let x = HEAD.edge
  for (const [words, colour] of legend) {
    brush.fillStyle = colour
    brush.fillRect(x, y + HEAD.legend / 2 - 5, 10, 10)
    write(words, '12px', x + 15, y + HEAD.legend / 2)
    x += 30 + brush.measureText(words).width
  }
  y += HEAD.legend
  for (const part of drawn) {
    const [caption, canvas] = part
    if (caption) write(caption, '12px', HEAD.edge, y + HEAD.caption / 2)
    brush.drawImage(
      canvas,
      0,
      y + (caption ? HEAD.caption : 0),
      canvas.width / scale,
      canvas.height / scale
    )
    y += heightOf(part)
  }
  return new Promise((resolve) => sheet.toBlob(resolve, 'image/png'))
}

/** Put a picture into the clipboard. False where the browser refuses, as it does on pages that are not secure. */
export async function copyPicture(blob) {
  try {
    await navigator.clipboard.write([new ClipboardItem({ 'image/png': blob })])
    return true
  } catch {
    return false
  }
}

/** Put a text into the clipboard. False where the browser refuses. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    return false
  }
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
