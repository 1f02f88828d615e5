import { RANGES, type Charted, type Named, type Range, type Sequence } from "./types";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function count(value: number): string {
  return whole.format(value);
}

export function compact(value: number): string {
  return value < 10_000 ? whole.format(value) : short.format(value);
}

/** A rate or mean with as many digits as say something; a dash for nothing. */
export function measure(value: number): string {
  if (value < 0) return "–";
  if (value >= 100 || Number.isInteger(value)) return compact(value);
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

export function milliseconds(value: number): string {
  if (value < 0) return "–";
  return value >= 1000 ? `${measure(value / 1000)} s` : `${measure(value)} ms`;
}

export function duration(ms: number): string {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export function clock(ms: number): string {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export function percent(share: number): string {
  return share < 0 ? "–" : `${Math.round(share * 100)} %`;
}

/** Name of a sequence, the same over its life: model, version that its client names, id with its type. */
export function keyOf(one: Sequence): string {
  return `${one.model}|${one.requested_version}|${one.is_text ? "s" : "i"}${one.id}`;
}

/** What names a sequence in an address. */
export function queryOf(one: Sequence): Record<string, string> {
  const named = { model: one.model, id: one.id, version: one.requested_version };
  return one.is_text ? { ...named, type: "string" } : named;
}

export function linkOf(one: Sequence): string {
  return `#/sequence?${new URLSearchParams(queryOf(one))}`;
}

export function namedBy(query: URLSearchParams): Named | null {
  const [model, id] = [query.get("model"), query.get("id")];
  if (!model || !id) return null;
  return { model, id, version: query.get("version") ?? "", string: query.get("type") === "string" };
}

/** What the address of the charts names; anything else is the whole mesh, and the last minutes. */
export function chartedBy(query: URLSearchParams): Charted {
  const range = RANGES.find((each): each is Range => each === query.get("range")) ?? RANGES[0];
  return { model: query.get("model") ?? "", version: query.get("version") ?? "", range };
}

/** What is not seen, or turns the letters around it: clients name their sequences as they like. */
const UNSEEN = /[\p{C}]|[^\S ]/gu;

function escaped(letter: string): string {
  const code = (letter.codePointAt(0) ?? 0).toString(16);
  return code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
}

/**
 * An id as people read it. A text stands in quotes if it looks like a number, because 42 and "42" differ, or if its
 * letters do not show what it is.
 */
export function idText({ id, is_text }: Pick<Sequence, "id" | "is_text">): string {
  if (!is_text || (/^[^'"]/.test(id) && !/^\d+$/.test(id) && id.split(" ").every(Boolean) && id.search(UNSEEN) < 0)) return id;
  return `"${id.replace(/["\\]/g, "\\$&").replace(UNSEEN, escaped)}"`;
}

/** A word of a command line that can be pasted into a shell: an id may be a command there. */
function word(text: string): string {
  if (/^[\w.:@%+,=/][\w.:@%+,=/-]*$/.test(text)) return text;
  return `$'${text.replace(/['\\]/g, "\\$&").replace(UNSEEN, escaped)}'`;
}

/** The command that names the trace of a sequence. */
export function traceCommand(named: Named): string {
  const looksLikeNumber = /^\d+$/.test(named.id);
  const options = [
    ...(named.string && looksLikeNumber ? ["--string"] : []),
    ...(named.version ? ["--version", named.version] : []),
    ...(named.id.startsWith("-") ? ["--"] : []),
  ];
  return ["seqmesh", "trace", ...options, named.model, named.id].map(word).join(" ");
}

/** A hue by which a sequence is recognised when it moves. Never the only sign: its id stands beside it. */
export function hueOf(one: Sequence): number {
  let hash = 7;
  for (const character of keyOf(one)) hash = (hash * 31 + character.charCodeAt(0)) >>> 0;
  return Math.round((hash * 137.508) % 360);
}
