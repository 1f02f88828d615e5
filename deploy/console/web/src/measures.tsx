// What charts show of the mesh, or of one model: rates, times with percentiles, the phases of a request.
import { useState } from "preact/hooks";
import { Batches, Lines, type Line, type Span } from "./charts";
import { measure, milliseconds, percent } from "./format";
import type { State } from "./store";
import { RANGES, type Charted, type Model, type Point, type Range, type View } from "./types";

/** Of all phases: what they are, as docs/reference/metrics.md has it. */
const PHASES: [string, string, string][] = [
  ["gateway", "Gateway", "from arrival until Redis has accepted it"],
  ["schedule", "Schedule", "until its owner has it: it waits here for a slot, or a takeover"],
  ["queue", "Queue", "until its batch begins"],
  ["compute", "Compute", "its batch, in the model"],
  ["checkpoint", "Checkpoint", "state, number and reply into Redis"],
  ["reply", "Reply", "until its caller has the answer"],
];
const STATELESS = new Set(["gateway", "queue", "compute", "reply"]);
const RANGE_MS: Record<Range, number> = { "5m": 300_000, "1h": 3_600_000 };
const RANGE_WORDS: Record<Range, string> = { "5m": "5 minutes", "1h": "1 hour" };

function percentiles(name: string): Line[] {
  return ["p50", "p95", "p99"].map((line, index) => ({ name: line, of: (point: Point) => point.times[name]?.[index] ?? -1 }));
}

function spanOf(view: View, state: State, range: Range): Span {
  return { end: view.at_ms, range_ms: RANGE_MS[range], every_ms: state.everyMs };
}

/** The mesh as a whole, on the overview. */
export function LastMinutes({ view, state }: { view: View; state: State }) {
  const [cursor, point] = useState<number | null>(null);
  const shared = { points: state.points, span: spanOf(view, state, "5m"), cursor, point };
  return (
    <section aria-labelledby="charts">
      <div class="row">
        <h2 id="charts">The last minutes</h2>
        <a href="#/charts">Charts by model, and of an hour</a>
      </div>
      <div class="charts four">
        <Rates {...shared} />
        <Lines title="Time of a request" lines={percentiles("request")} show={milliseconds} decades {...shared} />
        <Living {...shared} />
        <Batches batches={view.batches} />
      </div>
    </section>
  );
}

type Shared = Pick<Parameters<typeof Lines>[0], "points" | "span" | "cursor" | "point">;

function Rates(shared: Shared) {
  const lines: Line[] = [
    { name: "steps", of: (point) => point.steps_per_s },
    { name: "failed", of: (point) => point.failed_per_s },
  ];
  return <Lines title="Steps per second" lines={lines} {...shared} />;
}

function Living(shared: Shared) {
  const lines: Line[] = [
    { name: "live", of: (point) => point.live },
    { name: "waiting for a slot", of: (point) => point.waiting },
  ];
  return <Lines title="Sequences" lines={lines} show={(value) => measure(value)} {...shared} />;
}

interface Props {
  view: View;
  state: State;
  charted: Charted;
}

/** The page of charts. What it is of stands in its address. */
export function Charts({ view, state, charted }: Props) {
  const [cursor, point] = useState<number | null>(null);
  const model = view.models.find((one) => one.name === charted.model && one.version === charted.version);
  const shared = { points: state.points, span: spanOf(view, state, charted.range), cursor, point };
  const phases = PHASES.filter(([name]) => model === undefined || model.kind === "sequences" || STATELESS.has(name));
  return (
    <section aria-labelledby="charts-title">
      <h1 id="charts-title">Charts</h1>
      <Choice models={view.models} charted={charted} />
      {charted.model && !model && (
        <p class="empty-line">No living executor serves {charted.model} version {charted.version}: what was measured before stays for a while.</p>
      )}
      <h2 class="sr-only">What is done</h2>
      <div class="charts wide">
        <Rates {...shared} />
        <Lines title="Time of a request" note="from its arrival until its caller has the answer" lines={percentiles("request")} show={milliseconds} decades {...shared} />
        {(!model || model.kind === "sequences") && <Living {...shared} />}
        <Lines
          title="Batch fill"
          note="rows of the batches that ran, of those that they had room for"
          lines={[{ name: "filled", of: (at) => at.fill }]}
          show={percent}
          top={1}
          {...shared}
        />
      </div>
      <h2>Where the time goes</h2>
      <div class="charts">
        {phases.map(([name, title, note]) => (
          <Lines key={name} title={title} note={note} lines={percentiles(name)} show={milliseconds} decades {...shared} />
        ))}
      </div>
      <p class="muted">
        Percentiles come from the mesh's histograms, whose largest bucket begins at 10 s. Nothing is measured here while no page is open:{" "}
        a line has gaps then. Prometheus keeps what must be kept.
      </p>
    </section>
  );
}

function Choice({ models, charted }: { models: Model[]; charted: Charted }) {
  const go = (by: Partial<Charted>) => {
    const { model, version, range } = { ...charted, ...by };
    location.hash = `#/charts?${new URLSearchParams({ model, version, range })}`;
  };
  const value = (model: string, version: string) => JSON.stringify([model, version]);
  const served = models.some((one) => one.name === charted.model && one.version === charted.version);
  return (
    <div class="search card">
      <div class="grow">
        <label for="subject">Of</label>
        <select
          id="subject"
          value={value(charted.model, charted.version)}
          onChange={(event) => {
            const [model, version] = JSON.parse(event.currentTarget.value) as [string, string];
            go({ model, version });
          }}
        >
          <option value={value("", "")}>the whole mesh</option>
          {models.map((one) => (
            <option key={value(one.name, one.version)} value={value(one.name, one.version)}>{one.name}, version {one.version}</option>
          ))}
          {charted.model && !served && (
            <option value={value(charted.model, charted.version)}>{charted.model}, version {charted.version}</option>
          )}
        </select>
      </div>
      <div class="choice" role="group" aria-label="Range">
        {RANGES.map((range) => (
          <button key={range} type="button" aria-pressed={range === charted.range} onClick={() => go({ range })}>{RANGE_WORDS[range]}</button>
        ))}
      </div>
    </div>
  );
}
