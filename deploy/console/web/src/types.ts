// What the console sends: deploy/console/view.py, events.py and stories.py say what each field means.

export interface Served {
  model: string;
  version: string;
  instances: number;
  slots: number;
  held: number;
  pending: number;
  batches: number[];
  closing: boolean;
}

export interface Executor {
  id: string;
  name: string;
  host: string;
  pid: number;
  state: "serving" | "closing" | "leaving" | "dead";
  started_ms: number;
  drained: boolean;
  killable: boolean;
  cpu: number;
  memory: number;
  gpus: number[];
  models: Served[];
}

export interface Model {
  name: string;
  version: string;
  kind: "sequences" | "stateless" | "ensemble";
  backend: string;
  max_batch_size: number;
  executors: number;
  slots: number;
  used: number;
  live: number;
  waiting: number;
  paged: number;
  pending: number;
  steps_per_s: number;
  request_ms: number;
  batch: number;
  succeeded: number;
  failed: number;
}

export interface Sequence {
  id: string;
  is_text: boolean;
  model: string;
  version: string;
  requested_version: string;
  state: string;
  executor: string;
  instance: number;
  slot: number;
  steps: number;
  open: number;
  behind: number;
  recoverable: boolean;
  closed: boolean;
  begun_ms: number;
  used_ms: number;
  idle_left_ms: number;
  paused_until_ms: number;
  changed_ms: number;
  came_from: string;
}

export interface Point {
  at_ms: number;
  steps_per_s: number;
  failed_per_s: number;
  request_ms: number;
  batch: number;
  fill: number;
  live: number;
  waiting: number;
  times: Record<string, [number, number, number]>;
}

export interface News {
  number: number;
  at_ms: number;
  tone: "good" | "note" | "warn" | "bad";
  text: string;
}

export interface View {
  at_ms: number;
  took_ms: number;
  executors: Executor[];
  drained: string[];
  models: Model[];
  sequences: Sequence[];
  is_complete: boolean;
  point: Point;
  batches: [number, number][];
}

export interface Chart {
  every_ms: number;
  points: Point[];
}

export interface Begin {
  events: News[];
  every_ms: number;
  can_kill: boolean;
  release: string;
}

export interface StoryLine {
  at_ms: number;
  kind: string;
  text: string;
}

export interface Watched {
  sequence: Sequence | null;
  lines: StoryLine[];
}

/** A sequence as a link names it. */
export interface Named {
  model: string;
  id: string;
  version: string;
  string: boolean;
}

export const RANGES = ["5m", "1h"] as const;
export type Range = (typeof RANGES)[number];

/** What the charts of a page are of: a version of a model, or the whole mesh, whose name is empty. */
export interface Charted {
  model: string;
  version: string;
  range: Range;
}
