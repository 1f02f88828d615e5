import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { DrainDialog, serveAgain } from "./actions";
import { compact, count, duration, hueOf, idText, keyOf, linkOf, percent } from "./format";
import { KillDialog } from "./kill";
import { hasToken } from "./session";
import { askToSignIn, sequencesOf } from "./store";
import type { Executor, Sequence, Served, View } from "./types";

/** So many sequences of a model on one executor are shown with their ids; more of them are small squares. */
const NAMED_MAX = 48;
/** So many slots are drawn one by one, with the empty ones; an executor may offer hundreds of thousands. */
const SLOTS_DRAWN_MAX = 32;
/** For so long it is marked that a sequence has come from elsewhere. */
const FRESH_MS = 20_000;

/** killed: id of the executor that was killed from this page last, "" if none was */
export function Executors({ view, canKill, killed }: { view: View; canKill: boolean; killed: string }) {
  const signedIn = hasToken();
  const [killing, setKilling] = useState<Executor | null>(null);
  const [draining, setDraining] = useState<Executor | null>(null);
  const empty = view.sequences.length === 0 && view.point.live === 0;
  return (
    <section aria-labelledby="executors">
      <div class="row">
        <h2 id="executors">Executors and their sequences</h2>
        {canKill && !signedIn && (
          <p class="hint">
            <button class="link" onClick={askToSignIn}>Sign in</button> to kill one and see its sequences go on.
          </p>
        )}
      </div>
      {view.executors.length === 0 && (
        <p class="empty-line">No executor is in the mesh. Start one: <code>seqmesh executor --models DIR</code></p>
      )}
      {empty && view.executors.length > 0 && (
        <p class="empty-line">
          No sequence lives. Send one, or run <code>seqmesh demo</code> in another terminal, and it appears here.
        </p>
      )}
      {!view.is_complete && (
        <p class="empty-line">
          There are more sequences than are drawn one by one, so executors show numbers.{" "}
          <a href="#/sequences">Search one by its id.</a>
        </p>
      )}
      <ul class="executors">
        {view.executors.map((one) => (
          <ExecutorCard
            key={one.id}
            one={one}
            view={view}
            killed={one.id === killed && one.state !== "dead"}
            drain={signedIn && ["serving", "closing"].includes(one.state) && !one.drained ? () => setDraining(one) : null}
            undrain={signedIn && one.drained ? () => void serveAgain(one.name, one.id) : null}
            kill={canKill && one.killable && one.id !== killed ? () => (signedIn ? setKilling(one) : askToSignIn()) : null}
          />
        ))}
      </ul>
      <Drained names={view.drained} />
      <Unplaced view={view} />
      {draining && <DrainDialog executor={draining} close={() => setDraining(null)} />}
      {killing && <KillDialog executor={killing} close={() => setKilling(null)} />}
    </section>
  );
}

/** Executors that an operator has drained, and that are gone from the mesh until they may serve again. */
function Drained({ names }: { names: string[] }) {
  if (names.length === 0) return null;
  return (
    <ul class="card drained" aria-label="Drained executors">
      {names.map((name) => (
        <li key={name} class="row">
          <span><b>{name}</b> is drained: it takes no sequence.</span>
          {hasToken() && <button class="quiet" onClick={() => void serveAgain(name, name)}>Let {name} serve again</button>}
        </li>
      ))}
    </ul>
  );
}

/** Sequences between two slots. Those that wait for their first slot are known by their number alone. */
function Unplaced({ view }: { view: View }) {
  const found = view.sequences.filter((one) => one.state !== "live");
  if (found.length === 0) return null;
  const number = (state: string) => found.filter((one) => one.state === state).length;
  const said = [
    [number("paged"), "paged: their state rests in Redis until their next step"],
    [number("paused"), "paused by an operator"],
    [number("moving"), "on the way to another slot"],
  ] as const;
  return (
    <div class="card served">
      <div class="row tight">
        <h3>Without a slot</h3>
        <span class="muted">{said.flatMap(([each, words]) => (each ? [`${each} ${words}`] : [])).join("; ")}</span>
      </div>
      <Named found={found.slice(0, NAMED_MAX)} empty={0} label="no executor" at={view.at_ms} />
    </div>
  );
}

const STATES: Record<Executor["state"], [string, string, string]> = {
  serving: ["good", "●", "serving"],
  closing: ["note", "◐", "closing a model"],
  leaving: ["warn", "↗", "leaving"],
  dead: ["bad", "✕", "lost"],
};

interface CardProps {
  one: Executor;
  view: View;
  killed: boolean;
  kill: (() => void) | null;
  drain: (() => void) | null;
  undrain: (() => void) | null;
}

function ExecutorCard({ one, view, killed, kill, drain, undrain }: CardProps) {
  const [tone, glyph, word] = killed ? ["warn", "✕", "killed, its lease still holds"] : STATES[one.state];
  const withSequences = one.models.filter((served) => served.slots > 0);
  const stateless = one.models.filter((served) => served.slots === 0);
  return (
    <li class={`card executor ${one.state}`} data-executor={one.name} data-id={one.id}>
      <div class="row">
        <h3>{one.name}</h3>
        <span class={`badge ${tone}`}>
          <span aria-hidden="true">{glyph}</span> {!one.drained ? word : one.state === "leaving" ? "draining" : `${word}, drained`}
        </span>
        <div class="buttons">
          {drain && <button class="small" onClick={drain} aria-label={`Drain ${one.name}`}>Drain</button>}
          {undrain && <button class="small" onClick={undrain} aria-label={`Let ${one.name} serve again`}>Serve again</button>}
          {kill && <button class="danger-quiet" onClick={kill} aria-label={`Kill ${one.name}`}>Kill</button>}
        </div>
      </div>
      <p class="facts">
        process {one.pid} on {one.host}, up {duration(view.at_ms - one.started_ms)}, machine {percent(one.cpu)} CPU, {percent(one.memory)} memory
        {one.gpus.map((busy, index) => `, GPU ${index} ${percent(busy)}`)}
      </p>
      {withSequences.map((served) => (
        <ServedModel key={`${served.model}/${served.version}`} served={served} executor={one} view={view} />
      ))}
      {stateless.length > 0 && (
        <p class="facts">
          Without sequences:{" "}
          {stateless.map((served) => `${served.model}${served.pending ? ` (${served.pending} waiting)` : ""}`).join(", ")}
        </p>
      )}
    </li>
  );
}

function ServedModel({ served, executor, view }: { served: Served; executor: Executor; view: View }) {
  const found = sequencesOf(view, executor.id, served.model).filter((one) => !one.version || one.version === served.version);
  const slots = served.instances * served.slots;
  const label = `${served.model} on ${executor.name}`;
  return (
    <div class="served">
      <div class="row tight">
        <h4>
          {served.model} <span class="muted">version {served.version}</span>
        </h4>
        <span class="muted">
          {count(served.held)} of {compact(slots)} slots{served.pending ? `, ${served.pending} step${served.pending === 1 ? "" : "s"} waiting` : ""}
        </span>
      </div>
      {found.length > NAMED_MAX || !view.is_complete ? (
        <Squares found={found} held={served.held} slots={slots} label={label} at={view.at_ms} />
      ) : (
        <Named found={found} empty={slots <= SLOTS_DRAWN_MAX ? slots - found.length : 0} label={label} at={view.at_ms} />
      )}
      <BatchStrip served={served} view={view} />
    </div>
  );
}

/** form: its class. At Tab the first of a map has its turn, and `rove` goes on. */
function Place({ one, form, first, fresh, children }: { one: Sequence; form: string; first: boolean; fresh: boolean; children?: ComponentChildren }) {
  const words = describe(one, fresh);
  return (
    <li>
      <a
        href={linkOf(one)}
        class={`${form}${one.open ? " open" : ""}${fresh ? " fresh" : ""}`}
        tabIndex={first ? 0 : -1}
        aria-label={words}
        title={words}
        style={{ "--hue": String(hueOf(one)) }}
        data-sequence={one.id}
      >
        {children}
      </a>
    </li>
  );
}

function describe(one: Sequence, fresh: boolean): string {
  const at = one.state === "live" ? `instance ${one.instance}, slot ${one.slot}` : one.state;
  const from = fresh ? `, came from ${one.came_from}` : "";
  return `Sequence ${idText(one)}: ${count(one.steps)} steps${one.open ? `, ${one.open} open` : ""}, ${at}${from}`;
}

function isFresh(one: Sequence, at: number): boolean {
  return one.changed_ms > 0 && one.came_from !== "" && at - one.changed_ms < FRESH_MS;
}

function Named({ found, empty, label, at }: { found: Sequence[]; empty: number; label: string; at: number }) {
  if (found.length === 0 && empty === 0) return null;
  return (
    <ul class="slots" aria-label={`Sequences of ${label}`} onKeyDown={rove}>
      {found.map((one, index) => {
        const fresh = isFresh(one, at);
        return (
          <Place key={keyOf(one)} one={one} form="slot" first={index === 0} fresh={fresh}>
            {fresh && <span aria-hidden="true">↷</span>}
            <span class="slot-id">{idText(one)}</span>
            <span class="slot-steps">{compact(one.steps)}</span>
          </Place>
        );
      })}
      {Array.from({ length: empty }, (_, index) => (
        <li key={`empty-${index}`} class="slot empty-slot" aria-hidden="true" />
      ))}
    </ul>
  );
}

function Squares({ found, held, slots, label, at }: { found: Sequence[]; held: number; slots: number; label: string; at: number }) {
  if (found.length === 0) {
    return held > 0 ? <meter class="fill" min={0} max={slots} value={held} aria-label={`Slots in use by ${label}`} /> : null;
  }
  return (
    <ul class="squares" aria-label={`Sequences of ${label}`} onKeyDown={rove}>
      {found.map((one, index) => (
        <Place key={keyOf(one)} one={one} form="square" first={index === 0} fresh={isFresh(one, at)} />
      ))}
    </ul>
  );
}

/** Arrow keys go from slot to slot, so that Tab passes a whole map in one step. */
function rove(event: KeyboardEvent): void {
  const links = [...(event.currentTarget as HTMLElement).querySelectorAll("a")];
  const at = links.indexOf(document.activeElement as HTMLAnchorElement);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
  const link = to === undefined ? undefined : links[to];
  if (link === undefined) return;
  event.preventDefault();
  for (const each of links) each.tabIndex = each === link ? 0 : -1;
  link.focus();
}

function BatchStrip({ served, view }: { served: Served; view: View }) {
  if (served.batches.length === 0) return null;
  const model = view.models.find((one) => one.name === served.model && one.version === served.version);
  const most = Math.max(1, Math.min(model?.max_batch_size ?? 1, 4 * Math.max(...served.batches)));
  const words = `latest batches: ${served.batches.slice(-8).join(", ")} rows`;
  return (
    <div class="batches" role="img" aria-label={words} title={words}>
      <span class="muted" aria-hidden="true">batches</span>
      <svg viewBox={`0 0 ${served.batches.length * 5} 16`} width={served.batches.length * 5} height="16" preserveAspectRatio="xMaxYMax slice" aria-hidden="true">
        {served.batches.map((rows, index) => {
          const height = Math.max(2, (rows / most) * 16);
          return <rect key={index} x={index * 5} y={16 - height} width="4" height={height} rx="1" />;
        })}
      </svg>
      <span class="muted" aria-hidden="true">up to {Math.max(...served.batches)} of {Math.max(1, model?.max_batch_size ?? 1)} rows</span>
    </div>
  );
}
