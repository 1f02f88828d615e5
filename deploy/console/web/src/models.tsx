import { useState } from "preact/hooks";
import { compact, count, measure, milliseconds } from "./format";
import { ask } from "./session";
import type { Model, View } from "./types";

export function Models({ view }: { view: View }) {
  return (
    <section aria-labelledby="models-title">
      <h1 id="models-title">Models</h1>
      {view.models.length === 0 && (
        <p class="empty-line">
          No living executor serves a model. Does the repository hold any, and has one been loaded? The executors' logs say why not.
        </p>
      )}
      <ul class="models">
        {view.models.map((one) => (
          <ModelCard key={`${one.name}/${one.version}`} one={one} />
        ))}
      </ul>
    </section>
  );
}

function ModelCard({ one }: { one: Model }) {
  return (
    <li class="card" data-model={one.name}>
      <div class="row">
        <h2>
          {one.name} <span class="muted">version {one.version}</span>
        </h2>
        <span class="muted">{one.kind}, {one.backend || "backend not told"}</span>
      </div>
      <dl class="facts-grid">
        <Fact name="Steps per second" value={measure(one.steps_per_s)} />
        <Fact name="Request, mean" value={milliseconds(one.request_ms)} />
        <Fact name="Rows of a batch" value={`${measure(one.batch)} of ${Math.max(1, one.max_batch_size)}`} />
        <Fact name="Requests waiting" value={count(one.pending)} />
        <Fact name="Answered since load" value={compact(one.succeeded)} />
        <Fact name="Failed since load" value={compact(one.failed)} />
        <Fact name="Executors" value={one.executors ? count(one.executors) : "none"} tone={one.executors ? "" : "bad"} />
        {one.kind === "sequences" && (
          <>
            <Fact name="Slots in use" value={`${compact(one.used)} of ${compact(one.slots)}`} />
            <Fact name="Live" value={compact(one.live)} />
            <Fact name="Waiting for a slot" value={compact(one.waiting)} />
            <Fact name="Paged" value={compact(one.paged)} />
          </>
        )}
      </dl>
      <p><a href={`#/charts?${new URLSearchParams({ model: one.name, version: one.version })}`}>Charts<span class="sr-only"> of {one.name}</span></a></p>
      <Configuration name={one.name} />
    </li>
  );
}

export function Fact({ name, value, tone = "" }: { name: string; value: string; tone?: string }) {
  return (
    <div class={tone}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Configuration({ name }: { name: string }) {
  const [text, setText] = useState("");
  const read = async (event: Event) => {
    if (!(event.currentTarget as HTMLDetailsElement).open) return;
    setText("Reading …");
    try {
      const { config } = await ask<{ config: unknown }>(`/api/models/${encodeURIComponent(name)}`);
      setText(JSON.stringify(config, null, 2));
    } catch (refused) {
      setText(refused instanceof Error ? refused.message : String(refused));
    }
  };
  return (
    <details onToggle={(event) => void read(event)}>
      <summary>Configuration</summary>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}
