import { useState } from "preact/hooks";
import { clock } from "./format";
import type { News } from "./types";

const TONES: Record<News["tone"], [string, string]> = {
  good: ["✓", "good"],
  note: ["·", "note"],
  warn: ["!", "warning"],
  bad: ["✕", "bad"],
};

/** Lines of the log, the latest first. */
export function EventList({ events }: { events: News[] }) {
  if (events.length === 0) return <p class="empty-line">Nothing has happened since the console began to look.</p>;
  return (
    <ol class="events">
      {[...events].reverse().map((line) => {
        const [glyph, word] = TONES[line.tone];
        return (
          <li key={line.number} class={line.tone}>
            <time dateTime={new Date(line.at_ms).toISOString()}>{clock(line.at_ms)}</time>
            <span class="glyph"><span aria-hidden="true">{glyph}</span><span class="sr-only">{word}:</span></span>
            <span>{line.text}</span>
          </li>
        );
      })}
    </ol>
  );
}

export function Events({ events }: { events: News[] }) {
  const [text, setText] = useState("");
  const shown = events.filter((line) => line.text.toLowerCase().includes(text.toLowerCase()));
  return (
    <section aria-labelledby="events-title">
      <h1 id="events-title">Events</h1>
      <p class="muted">What this console has seen while somebody looked. Logs and traces hold the rest.</p>
      <label for="filter">Only lines with</label>
      <input id="filter" type="search" value={text} onInput={(event) => setText(event.currentTarget.value)} />
      {events.length > 0 && shown.length === 0 ? <p class="empty-line">No line has these words.</p> : <EventList events={shown} />}
    </section>
  );
}
