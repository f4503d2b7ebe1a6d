/* The strip over the canvas, there whether the sidebar is open or not: what the workers do, how far, how long still. */

import { h, keyed, setAttribute, setText } from './dom.mjs'
import { heroText, liveShare, liveText } from './told.mjs'
import { isAsleep, poolText, runOf } from './sidebar.mjs'

const AGAIN_MS = 500 // until ComfyUI has made the place

/** Put the strip into the element that `place()` finds, while there are workers and `shown()`; `open()` is a click's. */
export function mountStrip(store, t, { place, shown, open }) {
  const chips = h('span', { class: 'pdit-chips' })
  const text = h('span', { class: 'pdit-strip-text' })
  const bar = h('span', { class: 'pdit-strip-bar' }, h('i', {}))
  const strip = h(
    'button',
    { type: 'button', class: 'pdit pdit-strip', 'data-testid': 'pdit-strip', onclick: open, title: t('strip.open') },
    chips,
    text,
    bar
  )
  let timer = 0 // one at most
  const update = () => {
    clearTimeout(timer)
    const { state } = store
    const pools = (state?.pools ?? []).filter((each) => each.state !== 'stopped')
    const first = (...states) => pools.find((each) => states.includes(each.state))
    const working = pools.find((each) => each.sampling) ?? first('busy', 'compiling', 'loading', 'starting')
    const pool = working ?? first('failed') ?? pools.at(-1)
    if (!pool || !shown()) return strip.remove()
    const there = place()
    if (!there) return (timer = setTimeout(update, AGAIN_MS))
    if (strip.parentElement !== there) there.append(strip)
    const run = runOf(pool, state)
    keyed(
      chips,
      pool.ranks.slice(0, 16), // more do not fit
      (rank) => rank.rank,
      () => h('i', {}),
      (chip, rank) => {
        setAttribute(chip, 'data-state', isAsleep(rank, pool) ? 'asleep' : run ? 'busy' : pool.state)
        setAttribute(chip, 'title', rank.device)
      }
    )
    const gained = pool.state === 'idle' && heroText(store.newestRun()?.summary, t)
    setText(text, run ? liveText(run, t) : gained || poolText(pool, state, t))
    bar.firstChild.style.width = `${(100 * (run ? liveShare(run) : 0)).toFixed(1)}%`
  }
  const end = store.subscribe(update)
  return () => {
    clearTimeout(timer)
    return end()
  }
}
