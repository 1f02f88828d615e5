import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface Props {
  title: string;
  /** What the button says that does it. */
  word: string;
  danger?: boolean;
  /** Does it; what it throws is said in the dialog, which stays. */
  act: () => Promise<void>;
  close: () => void;
  children: ComponentChildren;
}

/** Asks once more, says what will happen, and does it. */
export function Confirm({ title, word, danger = false, act, close, children }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => dialog.current?.showModal(), []);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    setWrong("");
    try {
      await act();
      dialog.current?.close();
    } catch (refused) {
      setWrong(refused instanceof Error ? refused.message : String(refused));
    } finally {
      setBusy(false);
    }
  }

  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="dialog-title">
      <form onSubmit={(event) => void submit(event)}>
        <h2 id="dialog-title">{title}</h2>
        {children}
        <p class="wrong" role="alert">{wrong}</p>
        <div class="buttons">
          <button type="button" class="quiet" onClick={() => dialog.current?.close()}>Cancel</button>
          <button type="submit" class={danger ? "danger" : "primary"} aria-disabled={busy}>{busy ? "Waiting …" : word}</button>
        </div>
      </form>
    </dialog>
  );
}
