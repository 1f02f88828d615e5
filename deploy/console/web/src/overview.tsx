import { EventList } from "./events";
import { Executors } from "./executors";
import { compact, measure, milliseconds } from "./format";
import { KillReport } from "./kill";
import { LastMinutes } from "./measures";
import type { State } from "./store";
import type { View } from "./types";

export function Overview({ view, state }: { view: View; state: State }) {
  const { point } = view;
  const alive = view.executors.filter((one) => one.state !== "dead").length;
  const moving = view.models.reduce((sum, one) => sum + one.paged, 0);
  return (
    <>
      <h1 class="sr-only">Overview</h1>
      <dl class="numbers">
        <Figure name="Steps per second" value={measure(point.steps_per_s)} />
        <Figure name="Live sequences" value={compact(point.live)} note={moving ? `${compact(moving)} paged` : ""} />
        <Figure name="Waiting for a slot" value={compact(point.waiting)} tone={point.waiting ? "warn" : ""} />
        <Figure name="Request, mean" value={milliseconds(point.request_ms)} />
        <Figure name="Rows of a batch" value={measure(point.batch)} />
        <Figure name="Executors alive" value={`${alive} of ${view.executors.length}`} tone={alive < view.executors.length ? "warn" : ""} />
      </dl>
      <KillReport kill={state.kill} />
      <Executors view={view} canKill={state.begin?.can_kill ?? false} killed={state.kill?.id ?? ""} />
      <LastMinutes view={view} state={state} />
      <section aria-labelledby="latest">
        <div class="row">
          <h2 id="latest">Latest events</h2>
          <a href="#/events">All events</a>
        </div>
        <EventList events={state.events.slice(-8)} />
      </section>
    </>
  );
}

function Figure({ name, value, note = "", tone = "" }: { name: string; value: string; note?: string; tone?: string }) {
  return (
    <div class={tone}>
      <dt>{name}</dt>
      <dd>
        {value}
        {note && <small> {note}</small>}
      </dd>
    </div>
  );
}
