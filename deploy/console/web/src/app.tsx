import mark from "./mark.svg";
import { useEffect, useRef, useState } from "preact/hooks";
import { Events } from "./events";
import { chartedBy, namedBy } from "./format";
import { Charts } from "./measures";
import { Models } from "./models";
import { Overview } from "./overview";
import { SequencePage, Sequences } from "./sequences";
import { SignIn } from "./signin";
import { hasToken, signOut } from "./session";
import { askToSignIn, endSigning, forgetNotice, useStore, watch, type State } from "./store";

const PAGES: [string, string][] = [
  ["", "Overview"],
  ["sequences", "Sequences"],
  ["models", "Models"],
  ["charts", "Charts"],
  ["events", "Events"],
];

interface Place {
  page: string;
  query: URLSearchParams;
}

function place(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { page: path, query: new URLSearchParams(query) };
}

export function App() {
  const state = useStore();
  const [at, setAt] = useState(place);
  const signedIn = hasToken();
  const main = useRef<HTMLElement>(null);
  const watches = at.page === "sequence" ? `${at.query}` : "";
  const charts = at.page === "" || at.page === "charts" ? `${at.query}` : null;

  useEffect(() => {
    let before = place().page;
    const onHash = () => {
      const now = place();
      setAt(now);
      // Another choice on the same page leaves the focus where it is.
      if (now.page === before && now.page === "charts") return;
      before = now.page;
      forgetNotice();
      window.scrollTo(0, 0);
      main.current?.focus({ preventScroll: true });
    };
    window.addEventListener("hashchange", onHash);
    return () => window.removeEventListener("hashchange", onHash);
  }, []);
  useEffect(() => {
    const charted = charts === null ? null : chartedBy(new URLSearchParams(charts));
    watch(watches ? namedBy(new URLSearchParams(watches)) : null, charted);
  }, [watches, charts, signedIn]);
  useEffect(() => {
    const name = at.page === "sequence" ? "Sequence" : (PAGES.find(([path]) => path === at.page)?.[1] ?? "Overview");
    document.title = `${name} · seqmesh console`;
  }, [at.page]);

  const leave = () => {
    signOut();
    endSigning();
  };
  const mustSignIn = state.connection === "refused";
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href="#/">
          <img src={mark} alt="" width="24" height="24" />
          <span>seqmesh</span>
        </a>
        <nav aria-label="Pages">
          {PAGES.map(([path, name]) => (
            <a href={`#/${path}`} aria-current={at.page === path || (path === "sequences" && at.page === "sequence") ? "page" : undefined}>
              {name}
            </a>
          ))}
        </nav>
        <div class="top-right">
          <Status state={state} />
          {signedIn ? (
            <button class="quiet" onClick={leave}>Sign out</button>
          ) : (
            <button class="quiet" onClick={askToSignIn}>Sign in</button>
          )}
        </div>
      </header>
      <main id="main" tabIndex={-1} ref={main}>
        {state.problem && (
          <p class="notice bad" role="alert">
            <strong>The mesh cannot be read; the page goes on by itself when it can.</strong> {state.problem}
          </p>
        )}
        <div aria-live="polite" class={state.notice ? `notice ${state.notice.tone}` : "sr-only"}>
          {state.notice && (
            <>
              <span class="notice-text">{state.notice.text}</span>
              <button class="quiet" onClick={forgetNotice}>Close</button>
            </>
          )}
        </div>
        {mustSignIn ? (
          <section class="empty">
            <h1>Sign in to see this mesh</h1>
            <p>This console can be reached by other machines, so it shows nothing without its token.</p>
            <button class="primary" onClick={askToSignIn}>Sign in</button>
          </section>
        ) : (
          <Page at={at} state={state} />
        )}
      </main>
      <footer class="bottom">
        <span>seqmesh {state.begin?.release}</span>
        {state.view && <span>read in {state.view.took_ms.toFixed(0)} ms, while this page is open</span>}
      </footer>
      {state.signing && <SignIn />}
    </>
  );
}

function Page({ at, state }: { at: Place; state: State }) {
  if (state.view === null || state.begin === null) {
    return (
      <section class="empty" aria-busy="true">
        <h1>{state.connection === "lost" ? "The console does not answer" : "Reading the mesh …"}</h1>
        <p>{state.connection === "lost" ? "It is tried again every few seconds. Does seqmesh run?" : "This takes a second; where Redis does not answer, ten."}</p>
      </section>
    );
  }
  const shown = { view: state.view, state };
  if (at.page === "sequences") return <Sequences {...shown} />;
  if (at.page === "sequence") return <SequencePage {...shown} named={namedBy(at.query)} />;
  if (at.page === "models") return <Models {...shown} />;
  if (at.page === "charts") return <Charts {...shown} charted={chartedBy(at.query)} />;
  if (at.page === "events") return <Events events={state.events} />;
  return <Overview {...shown} />;
}

const WORDS: Record<State["connection"], [string, string]> = {
  live: ["good", "live"],
  connecting: ["note", "connecting"],
  lost: ["bad", "not connected"],
  paused: ["note", "paused"],
  refused: ["warn", "sign in"],
};

function Status({ state }: { state: State }) {
  // The console may answer where Redis does not: until it has read the mesh once, nothing is known to be live.
  const connection = state.connection === "live" && state.view === null ? "connecting" : state.connection;
  const [tone, word] = state.problem ? ["bad", "no mesh"] : WORDS[connection];
  return (
    <span class={`status ${tone}`} role="status">
      <span class="dot" aria-hidden="true" />
      {word}
    </span>
  );
}
