import { Confirm } from "./dialog";
import { ask } from "./session";
import { beginKill, forgetKill, type Kill } from "./store";
import type { Executor } from "./types";

/** Asks once more, then has the launcher kill an executor. */
export function KillDialog({ executor, close }: { executor: Executor; close: () => void }) {
  const held = executor.models.reduce((sum, one) => sum + one.held, 0);

  async function kill(): Promise<void> {
    beginKill(executor.name, executor.id, held);
    try {
      await ask(`/api/executors/${encodeURIComponent(executor.name)}/kill`, "POST");
    } catch (refused) {
      forgetKill();
      throw refused;
    }
  }

  return (
    <Confirm title={`Kill ${executor.name}?`} word="Kill it" danger act={kill} close={close}>
      <p>
        It gets SIGKILL, as if it had crashed. When its lease has ended, the others go on with its{" "}
        {held === 1 ? "one sequence" : `${held} sequences`} from Redis. Then <code>seqmesh up</code> starts it again.
      </p>
    </Confirm>
  );
}

/** What became of the sequences of the executor that was killed here. */
export function KillReport({ kill }: { kill: Kill | null }) {
  const text = kill === null ? "" : report(kill);
  return (
    <div aria-live="polite" class={kill === null ? "sr-only" : `notice ${kill.tookMs ? "good" : "note"}`} data-kill={kill?.executor}>
      {kill !== null && (
        <>
          <div class="kill-text">
            <strong>{kill.executor} was killed.</strong> {text}
            <progress max={Math.max(1, kill.had.size)} value={kill.goneOn + kill.resting + kill.over} aria-hidden="true" />
          </div>
          <button class="quiet" onClick={forgetKill}>Close</button>
        </>
      )}
    </div>
  );
}

function report(kill: Kill): string {
  const all = kill.had.size;
  if (kill.held > 0 && all === 0) return "Its sequences are too many to be followed one by one: the executors' numbers show where they go on.";
  if (all === 0) return "It had no sequence, so nothing had to be taken over.";
  const over = kill.over ? ` ${kill.over} came to an end meanwhile.` : "";
  const resting = kill.resting ? ` ${kill.resting} rest in Redis until the next step.` : "";
  if (kill.tookMs) {
    const seconds = (kill.tookMs / 1000).toFixed(1);
    const them = all === 1 ? "Its one sequence goes on" : `${kill.goneOn} of its ${all} sequences go on`;
    return `${them} elsewhere, ${seconds} s after the kill.${resting}${over}`;
  }
  if (kill.goneOn === 0) return `Its ${all === 1 ? "sequence waits" : `${all} sequences wait`} until its lease has ended …`;
  return `${kill.goneOn} of its ${all} sequences go on elsewhere …`;
}
