// Browsers start no Worker for a page that was opened as a file, and the site's search runs in one. Opened as a file, the
// page gets a Worker that is an invisible frame: the same messages, in the page's own thread. On a web server: nothing.
if (window.location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      // What a worker answers goes to the page, as an event of this object.
      inner.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      // Scripts of a file cannot be read, only loaded: one after the other, which the worker waits for.
      inner.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(inner, one)), Promise.resolve())
      load(inner, url).then(() => {
        for (const data of this.waiting.splice(0)) this.deliver(data)
        this.waiting = null
      })
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    deliver(data) {
      const inner = this.frame.contentWindow
      inner.dispatchEvent(new inner.MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
  const load = (inner, url) =>
    new Promise((resolve, reject) => {
      const script = inner.document.createElement("script")
      script.src = new URL(url, window.location.href)
      script.onload = resolve
      script.onerror = reject
      inner.document.body.append(script)
    })
}
