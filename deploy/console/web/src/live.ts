// The stream of events. Read with fetch and not with EventSource, which cannot send the token.
import { authorization } from "./session";
import type { Charted, Named } from "./types";

const PAUSE_FIRST_MS = 500;
const PAUSE_LAST_MS = 8000;
/** A page that nobody sees is told nothing after this time. */
const HIDDEN_MS = 30_000;
/** The console sends something every second: a stream that is silent for so long is dead. */
const SILENT_MS = 20_000;

export type Connection = "connecting" | "live" | "lost" | "paused" | "refused";

export interface Listener {
  message(kind: string, data: unknown): void;
  connection(state: Connection): void;
}

/** Listens until the returned function is called. watches: the sequence whose story is wanted; charted: what is charted */
export function listen(watches: Named | null, charted: Charted | null, listener: Listener): () => void {
  let control = new AbortController();
  let ended = false;
  let pause = PAUSE_FIRST_MS;
  let timer = 0;
  let hidden = 0;

  async function run(): Promise<void> {
    const own = (control = new AbortController());
    try {
      const response = await fetch(`/api/live?${query(watches, charted)}`, {
        headers: authorization(),
        signal: own.signal,
        cache: "no-store",
      });
      if (response.status === 403) {
        listener.connection("refused");
        return;
      }
      if (!response.ok || response.body === null) throw new Error(`status ${response.status}`);
      listener.connection("live");
      pause = PAUSE_FIRST_MS;
      await readAll(response.body, own, listener);
      throw new Error("the stream ended");
    } catch {
      if (ended || control !== own) return;
      // A page that nobody sees listens again when somebody looks at it.
      own.abort();
      if (document.hidden) return;
      listener.connection("lost");
      timer = window.setTimeout(() => void run(), pause);
      pause = Math.min(PAUSE_LAST_MS, pause * 2);
    }
  }

  function onVisibility(): void {
    window.clearTimeout(hidden);
    if (document.hidden) {
      hidden = window.setTimeout(() => {
        listener.connection("paused");
        control.abort();
      }, HIDDEN_MS);
    } else if (control.signal.aborted) {
      window.clearTimeout(timer);
      listener.connection("connecting");
      void run();
    }
  }

  document.addEventListener("visibilitychange", onVisibility);
  void run();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", onVisibility);
    window.clearTimeout(timer);
    window.clearTimeout(hidden);
    control.abort();
  };
}

function query(watches: Named | null, charted: Charted | null): URLSearchParams {
  const wanted = new URLSearchParams();
  if (watches !== null) {
    const { model, id, version, string } = watches;
    for (const [name, value] of Object.entries({ model, id, version, type: string ? "string" : "" })) wanted.set(name, value);
  }
  if (charted !== null) {
    const { model, version, range } = charted;
    for (const [name, value] of Object.entries({ chart: model, chart_version: version, range })) wanted.set(name, value);
  }
  return wanted;
}

async function readAll(body: ReadableStream<Uint8Array>, control: AbortController, listener: Listener): Promise<void> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let text = "";
  for (;;) {
    const silence = window.setTimeout(() => control.abort(), SILENT_MS);
    const { done, value } = await reader.read().finally(() => window.clearTimeout(silence));
    if (done) return;
    const messages = (text + value).split("\n\n");
    text = messages.pop() ?? "";
    for (const message of messages) {
      const [kind, data] = message.split("\n", 2);
      if (kind?.startsWith("event: ") && data?.startsWith("data: ")) {
        listener.message(kind.slice(7), JSON.parse(data.slice(6)));
      }
    }
  }
}
