/* The state the server told last, and who wants to know. Owns which of two answers is the newer; draws nothing. */

export const RUNS = ['denoise', 'denoise_list'] // kinds of reports of sampling runs

export class Store {
  /** `request(path, options)` is ComfyUI's fetchApi: it resolves to a Response. */
  constructor(request) {
    this._request = request
    this._listeners = new Set()
    this._reports = new Map()
    this.said = (text) => text // the server's sentences in the user's language
    this.state = null // null until the server has answered once
    this.problem = '' // why there is no answer; '' when there is one
    this.notLoaded = false // whether the server has this page of the pack and none of its nodes
  }

  /** Call `listener` now and at every change; returns what ends that. */
  subscribe(listener) {
    this._listeners.add(listener)
    listener(this)
    return () => this._listeners.delete(listener)
  }

  /** Ask for the state: at the start, and after a lost connection. */
  async refresh() {
    try {
      this.take(await this._json('/parallel_dit/state'))
    } catch (error) {
      this.problem = String(error.message ?? error)
      this.notLoaded = error.status === 404
      this.tell()
    }
  }

  /** Take a state from the server unless a newer one is there. */
  take(state) {
    if (state === null || typeof state !== 'object' || !Array.isArray(state.pools)) return
    const known = this.state
    if (known !== null && known.session === state.session && known.revision > state.revision) return
    if (known !== null && known.session !== state.session) this._reports.clear() // another server: numbers begin anew
    const listed = new Set((state.reports ?? []).map((entry) => entry.number))
    for (const number of this._reports.keys()) if (!listed.has(number)) this._reports.delete(number)
    this.state = this._inWords(state)
    this.problem = ''
    this.tell()
  }

  /** A report by its number; asked for once while the server lists it. */
  async report(number) {
    if (this._reports.has(number)) return this._reports.get(number)
    const session = this.state?.session
    const report = await this._json(`/parallel_dit/reports/${number}`)
    if (session !== this.state?.session) return report
    if (!this._reports.has(number)) this._reports.set(number, report) // of two that asked at once all get the first
    return this._reports.get(number)
  }

  /** A report by its number if it was asked for already. */
  known(number) {
    return this._reports.get(number)
  }

  /** The newest entry of a kind, or undefined. */
  newest(...kinds) {
    return (this.state?.reports ?? []).filter((entry) => kinds.includes(entry.kind)).at(-1)
  }

  /** The newest sampling run that was not queued for a comparison alone, or undefined; of those that `wanted` takes. */
  newestRun(wanted = () => true) {
    const runs = (this.state?.reports ?? []).filter((entry) => RUNS.includes(entry.kind) && wanted(entry))
    return runs.findLast((entry) => !entry.reference) ?? runs.at(-1)
  }

  /** The newest entry of some kinds that `wanted` takes, or undefined. */
  newestOf(kinds, wanted) {
    if (kinds === RUNS) return this.newestRun(wanted)
    return (this.state?.reports ?? []).findLast((entry) => kinds.includes(entry.kind) && wanted(entry))
  }

  /** Do an action of routes.py, `tune` with its values. Rejects with the server's own words when it refuses. */
  async act(name, values) {
    const query = values ? `?${new URLSearchParams(values)}` : ''
    this.take(await this._json(`/parallel_dit/${name}${query}`, { method: 'POST' }))
  }

  /** What SP Config with these values would do. */
  async plan(values) {
    const answer = await this._json(`/parallel_dit/plan?${new URLSearchParams(values)}`)
    for (const key of ['reasons', 'warnings']) answer[key] = answer[key]?.map(this.said)
    return answer.error === undefined ? answer : { ...answer, error: this.said(answer.error) }
  }

  /* What a state says in sentences: why workers failed, and what the doctor found. */
  _inWords(state) {
    const { doctor, pools } = state
    const check = (each) => ({ ...each, name: this.said(each.name), seen: this.said(each.seen), remedy: this.said(each.remedy) })
    const told = doctor && { ...doctor, message: this.said(doctor.message) }
    if (Array.isArray(doctor?.checks)) told.checks = doctor.checks.map(check)
    if (Array.isArray(doctor?.warnings)) told.warnings = doctor.warnings.map(this.said)
    return {
      ...state,
      ...(told ? { doctor: told } : {}),
      pools: pools.map((pool) => ({ ...pool, last_failure: this.said(pool.last_failure) }))
    }
  }

  async _json(path, options) {
    const response = await this._request(path, options)
    const body = await response.json().catch(() => ({}))
    if (!response.ok) {
      const error = new Error(this.said(body.error) ?? `${response.status} ${response.statusText}`)
      throw Object.assign(error, { status: response.status })
    }
    return body
  }

  /** Have everybody look again, for a reason that is not in the state. */
  tell() {
    this._listeners.forEach((listener) => listener(this))
  }
}
