import { useState } from "preact/hooks";
import { isOpen, SequenceActions } from "./actions";
import { clock, count, duration, idText, keyOf, linkOf, traceCommand } from "./format";
import { Fact } from "./models";
import { ask } from "./session";
import type { State } from "./store";
import type { Named, Sequence, View } from "./types";

interface Found {
  sequences: Sequence[];
  are_all: boolean;
  most: number;
}

export function Sequences({ view }: { view: View }) {
  const models = [...new Set(view.models.filter((one) => one.kind === "sequences").map((one) => one.name))];
  const [id, setId] = useState("");
  const [model, setModel] = useState("");
  const [found, setFound] = useState<Found | null>(null);
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);

  async function search(event: Event): Promise<void> {
    event.preventDefault();
    setBusy(true);
    setWrong("");
    try {
      const asked: Record<string, string> = model ? { model, prefix: id } : { id };
      setFound(await ask<Found>(`/api/sequences?${new URLSearchParams(asked)}`));
    } catch (refused) {
      setWrong(refused instanceof Error ? refused.message : String(refused));
    } finally {
      setBusy(false);
    }
  }

  return (
    <section aria-labelledby="sequences-title">
      <h1 id="sequences-title">Sequences</h1>
      <form class="search card" role="search" onSubmit={(event) => void search(event)}>
        <div>
          <label for="model">Model</label>
          <select id="model" value={model} onChange={(event) => setModel(event.currentTarget.value)}>
            <option value="">any model, this very id</option>
            {models.map((name) => (
              <option key={name} value={name}>{name}, ids that begin so</option>
            ))}
          </select>
        </div>
        <div class="grow">
          <label for="id">Id, as the client gives it</label>
          <input id="id" value={id} required={!model} maxLength={256} onInput={(event) => setId(event.currentTarget.value)} />
        </div>
        <button class="primary" type="submit" disabled={busy}>{busy ? "Searching …" : "Search"}</button>
        {found && <button class="quiet" type="button" onClick={() => setFound(null)}>Clear</button>}
      </form>
      <p class="wrong" role="alert">{wrong}</p>
      {found ? <Results found={found} at={view.at_ms} /> : <Live view={view} />}
    </section>
  );
}

function Results({ found, at }: { found: Found; at: number }) {
  if (found.sequences.length === 0) {
    return (
      <p class="empty-line">
        There is no such sequence. One that is over is remembered for a minute (<code>--tombstone-seconds</code>), and 42 and "42" are two ids.
      </p>
    );
  }
  return (
    <>
      <p role="status" class="muted">
        {found.are_all ? `${found.sequences.length} found.` : `The first ${found.sequences.length} that were found: type more of the id to see fewer.`}
      </p>
      <Table sequences={found.sequences} at={at} />
    </>
  );
}

function Live({ view }: { view: View }) {
  if (view.sequences.length === 0) {
    return (
      <p class="empty-line">
        {view.is_complete
          ? "No sequence is in a slot. Those that wait or are paged are found by their id, or by their model."
          : "There are too many sequences to list them all. Search one by its id, or choose a model."}
      </p>
    );
  }
  return (
    <>
      <p class="muted">In slots now, or lately:</p>
      <Table sequences={view.sequences} at={view.at_ms} />
    </>
  );
}

/** The name in an executor's id, which is the name and a random part. */
function nameOf(executor: string): string {
  return executor.replace(/-[^-]*$/, "");
}

function Table({ sequences, at }: { sequences: Sequence[]; at: number }) {
  const sorted = [...sequences].sort((a, b) => keyOf(a).localeCompare(keyOf(b), "en", { numeric: true }));
  return (
    <div class="scroll card" tabIndex={0} role="region" aria-label="Sequences">
      <table>
        <thead>
          <tr>
            <th scope="col">Id</th>
            <th scope="col">Model</th>
            <th scope="col">State</th>
            <th scope="col">Executor</th>
            <th scope="col" class="number">Steps</th>
            <th scope="col" class="number">Open</th>
            <th scope="col" class="number">Last step</th>
          </tr>
        </thead>
        <tbody>
          {sorted.map((one) => (
            <tr key={keyOf(one)}>
              <th scope="row"><a href={linkOf(one)}>{idText(one)}</a></th>
              <td>{one.model}{one.requested_version && ` (${one.requested_version})`}</td>
              <td>{one.state}{one.closed && one.state === "live" ? ", ends" : ""}</td>
              <td title={one.executor}>{nameOf(one.executor)}</td>
              <td class="number">{count(one.steps)}</td>
              <td class="number">{one.open || ""}</td>
              <td class="number">{duration(at - one.used_ms)} ago</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function SequencePage({ view, state, named }: { view: View; state: State; named: Named | null }) {
  const watched = state.watched;
  if (named === null) return <p class="empty-line">This address names no sequence. <a href="#/sequences">Search one.</a></p>;
  return (
    <section aria-labelledby="sequence-title">
      <p><a href="#/sequences">All sequences</a></p>
      <h1 id="sequence-title">Sequence {idText({ id: named.id, is_text: named.string || !/^\d+$/.test(named.id) })}</h1>
      <p class="muted">of {named.model}{named.version && `, version ${named.version}`}</p>
      {watched === null && <p class="empty-line" aria-busy="true">Reading it …</p>}
      {watched !== null && watched.sequence === null && (
        <p class="empty-line">The mesh does not know this sequence: it has not begun, or it was over more than a minute ago.</p>
      )}
      {watched !== null && watched.sequence !== null && (
        <>
          <Facts one={watched.sequence} at={view.at_ms} />
          <SequenceActions one={watched.sequence} view={view} />
        </>
      )}
      {watched !== null && watched.lines.length > 0 && (
        <>
          <h2>Its story</h2>
          <ol class="story">
            {watched.lines.map((line, index) => (
              <li key={index} class={line.kind}>
                <time dateTime={new Date(line.at_ms).toISOString()}>{clock(line.at_ms)}</time>
                <span>{line.text}</span>
              </li>
            ))}
          </ol>
          <p class="muted">
            The mesh keeps no history of a sequence. This is what its record says, and what the console saw while somebody looked.
            Its trace has every step: <code class="whole">{traceCommand(named)}</code>
          </p>
        </>
      )}
    </section>
  );
}

function Facts({ one, at }: { one: Sequence; at: number }) {
  const facts: [string, string][] = [
    ["State", one.closed && one.state === "live" ? `${one.state}, accepts nothing but a START` : one.state],
    ["Executor", one.executor ? `${one.executor}, instance ${one.instance}, slot ${one.slot}` : "none now"],
    ["Steps since START", `${count(one.steps)}${one.open ? `, ${one.open} of them open` : ""}`],
    ["State kept", one.recoverable ? `by the mesh${one.behind ? `; a takeover runs ${one.behind} steps again` : ""}` : "by its executor alone"],
    ["Began", one.begun_ms ? `${clock(one.begun_ms)}, ${duration(at - one.begun_ms)} ago` : "not known"],
    ["Last step", one.used_ms ? `${duration(at - one.used_ms)} ago` : "none yet"],
    one.state === "paused"
      ? ["Resumed", `in ${duration(one.paused_until_ms - at)}, if nobody does it before`]
      : ["Expires", one.idle_left_ms >= 0 ? `in ${duration(one.idle_left_ms)}, unless a step comes` : "not while a step is open"],
  ];
  const ofOpen = new Set(["Executor", "State kept", "Expires"]);
  return (
    <dl class="facts-grid card">
      {facts.filter(([name]) => isOpen(one) || !ofOpen.has(name)).map(([name, value]) => (
        <Fact key={name} name={name} value={value} />
      ))}
    </dl>
  );
}
