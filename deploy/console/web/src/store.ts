// The state of the page, and its one door: messages come in, components are told.
import { useEffect, useState } from "preact/hooks";
import { keyOf } from "./format";
import { listen, type Connection } from "./live";
import type { Begin, Chart, Charted, Named, News, Point, Sequence, View, Watched } from "./types";

const POINTS_MAX = 300;
const EVENTS_MAX = 300;

/** An executor that was killed from this page, and the sequences that it had. */
export interface Kill {
  executor: string;
  id: string;
  at: number;
  /** How many it held, and those of them that are followed one by one. */
  held: number;
  had: Set<string>;
  goneOn: number;
  resting: number;
  over: number;
  tookMs: number;
}

/** What an action did. */
export interface Notice {
  tone: "good" | "bad";
  text: string;
}

export interface State {
  connection: Connection;
  problem: string;
  begin: Begin | null;
  view: View | null;
  points: Point[];
  everyMs: number;
  events: News[];
  watched: Watched | null;
  kill: Kill | null;
  notice: Notice | null;
  /** Whether the dialog of signing in is open. */
  signing: boolean;
}

let state: State = {
  connection: "connecting",
  problem: "",
  begin: null,
  view: null,
  points: [],
  everyMs: 1000,
  events: [],
  watched: null,
  kill: null,
  notice: null,
  signing: false,
};
const subscribers = new Set<() => void>();
let stop: () => void = () => undefined;

function change(by: Partial<State>): void {
  state = { ...state, ...by };
  for (const tell of subscribers) tell();
}

export function useStore(): State {
  const [, again] = useState(0);
  useEffect(() => {
    const tell = () => again((n) => n + 1);
    subscribers.add(tell);
    return () => void subscribers.delete(tell);
  }, []);
  return state;
}

/** Listens anew, with another sequence to watch, or other charts. */
export function watch(named: Named | null, charted: Charted | null): void {
  stop();
  change({ watched: null, points: [], connection: state.connection === "live" ? "live" : "connecting" });
  stop = listen(named, charted, { message: take, connection: (connection) => change({ connection }) });
}

function take(kind: string, data: unknown): void {
  if (kind === "begin") {
    const begin = data as Begin;
    change({ begin, events: begin.events });
  } else if (kind === "chart") {
    const { points, every_ms } = data as Chart;
    change({ points, everyMs: every_ms });
  } else if (kind === "point") {
    change({ points: withPoint(state.points, data as Point, state.everyMs) });
  } else if (kind === "view") {
    const view = data as View;
    change({ view, problem: "", kill: followed(state.kill, view) });
  } else if (kind === "events") {
    change({ events: [...state.events, ...(data as News[])].slice(-EVENTS_MAX) });
  } else if (kind === "story") {
    change({ watched: data as Watched });
  } else if (kind === "problem") {
    change({ problem: (data as { text: string }).text });
  }
}

/** A point takes the place of the one before it, while both are of the same piece of the time. */
function withPoint(points: Point[], point: Point, everyMs: number): Point[] {
  const last = points[points.length - 1];
  const isSame = last !== undefined && Math.floor(last.at_ms / everyMs) === Math.floor(point.at_ms / everyMs);
  return [...(isSame ? points.slice(0, -1) : points), point].slice(-POINTS_MAX);
}

export function sequencesOf(view: View, executor: string, model: string): Sequence[] {
  return view.sequences
    .filter((one) => one.executor === executor && one.model === model)
    .sort((a, b) => a.instance - b.instance || a.slot - b.slot);
}

export function beginKill(name: string, id: string, held: number): void {
  const had = new Set((state.view?.sequences ?? []).filter((one) => one.executor === id).map(keyOf));
  change({ notice: null, kill: { executor: name, id, at: Date.now(), held, had, goneOn: 0, resting: 0, over: 0, tookMs: 0 } });
}

/** Says what an action did, until the next one, or until it is closed. */
export function say(tone: Notice["tone"], text: string): void {
  change({ notice: { tone, text } });
}

/** Opens the dialog of signing in. */
export function askToSignIn(): void {
  change({ signing: true });
}

/** The dialog of signing in is closed, or who had signed in has left. */
export function endSigning(): void {
  change({ signing: false });
}

export function forgetNotice(): void {
  change({ notice: null });
}

export function forgetKill(): void {
  change({ kill: null });
}

function followed(kill: Kill | null, view: View): Kill | null {
  if (kill === null || kill.tookMs > 0) return kill;
  const now = new Map(view.sequences.map((one) => [keyOf(one), one]));
  const had = [...kill.had].map((key) => now.get(key));
  const goneOn = had.filter((one) => one?.state === "live" && one.executor !== kill.id).length;
  const resting = had.filter((one) => one?.state === "paged").length;
  const moving = had.filter((one) => one?.state === "moving").length;
  const left = view.executors.some((one) => one.id === kill.id && one.models.some((served) => served.held > 0));
  const over = left ? 0 : kill.had.size - goneOn - resting - moving;
  const tookMs = !left && moving === 0 && kill.had.size > 0 ? Date.now() - kill.at : 0;
  return { ...kill, goneOn, resting, over, tookMs };
}
