import { useEffect, useRef, useState } from "preact/hooks";
import { signIn } from "./session";
import { endSigning } from "./store";

export function SignIn() {
  const dialog = useRef<HTMLDialogElement>(null);
  const [token, setToken] = useState("");
  const [wrong, setWrong] = useState("");
  useEffect(() => dialog.current?.showModal(), []);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    try {
      if (await signIn(token.trim())) endSigning();
      else setWrong("This is not the token of this console.");
    } catch {
      setWrong("The console does not answer.");
    }
  }

  return (
    <dialog ref={dialog} onClose={endSigning} aria-labelledby="signin-title">
      <form onSubmit={(event) => void submit(event)}>
        <h2 id="signin-title">Sign in</h2>
        <p>
          The token stands in the address that <code>seqmesh up</code> printed, behind <code>#token=</code>.
        </p>
        <label for="token">Token</label>
        <input
          id="token"
          type="password"
          autocomplete="off"
          required
          value={token}
          aria-describedby="token-wrong"
          aria-invalid={wrong ? "true" : undefined}
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        <p id="token-wrong" class="wrong" role="alert">{wrong}</p>
        <div class="buttons">
          <button type="button" class="quiet" onClick={() => dialog.current?.close()}>Cancel</button>
          <button type="submit" class="primary">Sign in</button>
        </div>
      </form>
    </dialog>
  );
}
