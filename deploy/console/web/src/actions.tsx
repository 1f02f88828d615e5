// What who has signed in may do to a sequence and to an executor. Each action may be repeated, and says what it did.
import { useState } from "preact/hooks";
import { Confirm } from "./dialog";
import { idText, queryOf } from "./format";
import { ask, hasToken } from "./session";
import { askToSignIn, say } from "./store";
import type { Executor, Sequence, View } from "./types";

const OPEN = new Set(["waiting", "live", "moving", "paged", "paused"]);
const PAUSES: [string, number][] = [["10 minutes", 600], ["1 hour", 3600], ["1 day", 86_400]];
type Action = "end" | "pause" | "resume" | "move";

/** Whether a sequence is not over. */
export function isOpen(one: Sequence): boolean {
  return OPEN.has(one.state);
}

async function tell(one: Sequence, action: Action, more: Record<string, string> = {}): Promise<void> {
  const query = new URLSearchParams({ ...queryOf(one), ...more });
  const { said } = await ask<{ said: string }>(`/api/sequences/${action}?${query}`, "POST");
  say("good", `Sequence ${idText(one)}: ${said}.`);
}

export function SequenceActions({ one, view }: { one: Sequence; view: View }) {
  const [asking, setAsking] = useState<Action | null>(null);
  if (!isOpen(one)) return null;
  if (!hasToken()) {
    return <p class="hint"><button class="link" onClick={askToSignIn}>Sign in</button> to pause, move or end it.</p>;
  }
  const close = () => setAsking(null);
  const resume = () => void tell(one, "resume").catch((refused: unknown) => say("bad", refused instanceof Error ? refused.message : String(refused)));
  return (
    <div class="buttons start" role="group" aria-label="Actions">
      {one.state === "paused" ? <button class="small" onClick={resume}>Resume</button> : <button class="small" onClick={() => setAsking("pause")}>Pause …</button>}
      {one.state === "live" && <button class="small" onClick={() => setAsking("move")}>Move …</button>}
      <button class="danger-quiet" onClick={() => setAsking("end")}>End …</button>
      {asking === "pause" && <PauseDialog one={one} close={close} />}
      {asking === "move" && <MoveDialog one={one} view={view} close={close} />}
      {asking === "end" && <EndDialog one={one} close={close} />}
    </div>
  );
}

function EndDialog({ one, close }: { one: Sequence; close: () => void }) {
  return (
    <Confirm title={`End sequence ${idText(one)}?`} word="End it" danger act={() => tell(one, "end")} close={close}>
      <p>
        Its state is dropped, and the model gets no END. {one.open ? `Its ${one.open} open steps are run and answered. ` : ""}
        Its client hears with the next step that the sequence was cancelled.
      </p>
    </Confirm>
  );
}

function PauseDialog({ one, close }: { one: Sequence; close: () => void }) {
  const [seconds, setSeconds] = useState("3600");
  return (
    <Confirm title={`Pause sequence ${idText(one)}?`} word="Pause it" act={() => tell(one, "pause", { seconds })} close={close}>
      <p>It leaves its slot. Steps are accepted and wait, in their order, until it is resumed or the time is over.</p>
      <div>
        <label for="pause-seconds">At most for</label>
        <select id="pause-seconds" value={seconds} onChange={(event) => setSeconds(event.currentTarget.value)}>
          {PAUSES.map(([words, each]) => <option key={each} value={String(each)}>{words}</option>)}
        </select>
      </div>
    </Confirm>
  );
}

function MoveDialog({ one, view, close }: { one: Sequence; view: View; close: () => void }) {
  const [to, setTo] = useState("");
  // Where it was when somebody decided to move it: if it has left meanwhile, it is not moved again.
  const [leaving] = useState(one.executor);
  const others = view.executors.filter(
    (each) => each.id !== leaving && each.state === "serving" && !each.drained && each.models.some((served) => served.model === one.model),
  );
  return (
    <Confirm title={`Move sequence ${idText(one)}?`} word="Move it" act={() => tell(one, "move", { to, leaving })} close={close}>
      <p>It goes on elsewhere between two of its steps. Its client notices nothing but one step that takes a moment longer.</p>
      <div>
        <label for="move-to">To</label>
        <select id="move-to" value={to} onChange={(event) => setTo(event.currentTarget.value)}>
          <option value="">any other executor</option>
          {others.map((each) => <option key={each.id} value={each.id}>{each.name}</option>)}
        </select>
      </div>
    </Confirm>
  );
}

export function DrainDialog({ executor, close }: { executor: Executor; close: () => void }) {
  async function drain(): Promise<void> {
    const { said } = await ask<{ said: string }>(`/api/executors/${encodeURIComponent(executor.id)}/drain`, "POST");
    say("good", `${executor.name}: ${said}.`);
  }
  const held = executor.models.reduce((sum, one) => sum + one.held, 0);
  return (
    <Confirm title={`Drain ${executor.name}?`} word="Drain it" act={drain} close={close}>
      <p>
        {held === 0 ? "It has no sequence." : `It hands over its ${held === 1 ? "sequence" : `${held} sequences`}, and no caller sees an error.`}{" "}
        Its process goes on with its models loaded, and takes nothing until it may serve again. The others do its work.
      </p>
    </Confirm>
  );
}

/** Takes a drain back. id: under which it is drained */
export async function serveAgain(name: string, id: string): Promise<void> {
  try {
    const { said } = await ask<{ said: string }>(`/api/executors/${encodeURIComponent(id)}/undrain`, "POST");
    say("good", `${name}: ${said}.`);
  } catch (refused) {
    say("bad", refused instanceof Error ? refused.message : String(refused));
  }
}
