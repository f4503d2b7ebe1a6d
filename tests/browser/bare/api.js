/* As ComfyUI's scripts/api.js, as far as the panel asks it: events, and requests to the server of the page. */

class Api extends EventTarget {
  clientId = 'bare'

  apiURL(path) {
    return path
  }

  fetchApi(path, options) {
    return fetch(path, options)
  }

  dispatchCustomEvent(type, detail) {
    return this.dispatchEvent(new CustomEvent(type, { detail }))
  }

  async queuePrompt(number, prompt) {
    return (await fetch('/prompt', { method: 'POST', body: JSON.stringify(prompt) })).json()
  }
}

export const api = new Api()
