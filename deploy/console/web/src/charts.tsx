// Charts as SVG: few lines, colours and sizes from the style sheet, a table for who does not see lines.
import { useState } from "preact/hooks";
import { clock, measure } from "./format";
import type { Point } from "./types";

const WIDTH = 320;
const HEIGHT = 120;
const ROWS_MAX = 12;
/** Where an axis of decades begins, ms. */
const LEAST = 0.1;

/** The time that charts show. end: its end, ms since 1970; every_ms: what one point stands for */
export interface Span {
  end: number;
  range_ms: number;
  every_ms: number;
}

export interface Line {
  name: string;
  of: (point: Point) => number;
}

interface LinesProps {
  title: string;
  note?: string;
  points: Point[];
  span: Span;
  lines: Line[];
  /** A value with its unit. */
  show?: (value: number) => string;
  /** Where the axis ends, if that is known. */
  top?: number;
  /** Each line of the grid is ten times the one below, from a tenth of a millisecond: as the buckets are. */
  decades?: boolean;
  /** The time under the pointer, in all charts beside each other. */
  cursor: number | null;
  point: (at: number | null) => void;
}

export function Lines({ title, note, points, span, lines, show = measure, top, decades = false, cursor, point }: LinesProps) {
  const begin = beginOf(points, span);
  const shown = cursor === null ? latest(points, span) : nearest(points, cursor, span);
  const drawn = points.filter((each) => each.at_ms >= begin);
  const most = top ?? niceTop(Math.max(...drawn.flatMap((each) => lines.map((line) => line.of(each))), 0), decades);
  const grid = decades ? powers(most) : [0, most / 2, most];
  const times = ticks(begin, span.end);
  const isFine = times.some((at) => at % 60_000);
  const x = (at: number) => ((at - begin) / (span.end - begin)) * WIDTH;
  const share = (value: number) => (decades ? Math.log10(Math.max(value, LEAST) / LEAST) / Math.log10(most / LEAST) : value / most);
  const y = (value: number) => HEIGHT * (1 - share(value));
  const value = (line: Line) => (shown ? show(line.of(shown)) : "–");

  const move = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    point(begin + ((event.clientX - box.left) / box.width) * (span.end - begin));
  };
  return (
    <figure class="card chart">
      <figcaption>
        <h3>{title}</h3>
        {note && <p class="muted">{note}</p>}
        <ul class="legend">
          {lines.map((line, index) => (
            <li key={line.name} class={`series-${index}`}>
              <svg width="18" height="8" aria-hidden="true"><line x1="0" y1="4" x2="18" y2="4" /></svg>
              {line.name} <b>{value(line)}</b>
            </li>
          ))}
        </ul>
      </figcaption>
      <div class="plot" aria-hidden="true">
        <div class="axis axis-y">
          {grid.map((value) => <span key={value} style={{ "--at": `${(y(value) / HEIGHT) * 100}%` }}>{show(value)}</span>)}
        </div>
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          onPointerMove={move}
          onPointerDown={move}
          onPointerLeave={() => point(null)}
        >
          {times.map((at) => <line key={at} class="grid" x1={x(at)} y1="0" x2={x(at)} y2={HEIGHT} />)}
          {grid.map((value) => <line key={`y${value}`} class="grid" x1="0" y1={y(value)} x2={WIDTH} y2={y(value)} />)}
          {lines.map((line, index) => (
            <path key={line.name} class={`line series-${index}`} d={path(drawn, line.of, x, y, gapOf(span))} />
          ))}
          {cursor !== null && shown && <line class="cursor" x1={x(shown.at_ms)} y1="0" x2={x(shown.at_ms)} y2={HEIGHT} />}
        </svg>
        <div class={`axis axis-x${isFine ? " fine" : ""}`}>
          {times.map((at) => (
            <span key={at} style={{ "--at": `${(x(at) / WIDTH) * 100}%` }}>{isFine ? clock(at) : clock(at).slice(0, 5)}</span>
          ))}
        </div>
      </div>
      <Table title={title} points={drawn} span={span} lines={lines} show={show} />
    </figure>
  );
}

/** The same numbers as text: one row for each piece of the time, the latest first. */
function Table({ title, points, span, lines, show }: { title: string; points: Point[]; span: Span; lines: Line[]; show: (value: number) => string }) {
  const [open, setOpen] = useState(false);
  const piece = Math.ceil(span.range_ms / ROWS_MAX);
  const rows = new Map(points.map((each) => [Math.floor(each.at_ms / piece), each]));
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>As a table<span class="sr-only">: {title}</span></summary>
      {open && (
        <div class="scroll" tabIndex={0} role="region" aria-label={`Table: ${title}`}>
          <table>
            <thead>
              <tr><th scope="col">Time</th>{lines.map((line) => <th scope="col" class="number" key={line.name}>{line.name}</th>)}</tr>
            </thead>
            <tbody>
              {[...rows.values()].reverse().slice(0, ROWS_MAX).map((each) => (
                <tr key={each.at_ms}>
                  <th scope="row">{clock(each.at_ms)}</th>
                  {lines.map((line) => <td class="number" key={line.name}>{show(line.of(each))}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}

/** Where the axis of time begins: the range is filled from a fifth of it on, so that the first minutes are no thin strip. */
function beginOf(points: Point[], { end, range_ms }: Span): number {
  const seen = points[0] ? end - points[0].at_ms : 0;
  return end - Math.max(range_ms / 5, Math.min(range_ms, seen));
}

/** Round times, at most six of them. */
function ticks(begin: number, end: number): number[] {
  const step = [10, 20, 30, 60, 120, 300, 600].map((seconds) => 1000 * seconds).find((each) => end - begin < 6 * each) ?? 600_000;
  const first = Math.ceil(begin / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((end - first) / step) + 1) }, (_, index) => first + index * step);
}

function powers(most: number): number[] {
  return Array.from({ length: Math.round(Math.log10(most / LEAST)) + 1 }, (_, index) => LEAST * 10 ** index);
}

/** Points further apart have nothing between them. A mesh that takes long to read is read every ten seconds. */
function gapOf(span: Span): number {
  return Math.max(3 * span.every_ms, 12_000);
}

/** The last point, unless it is long ago. */
function latest(points: Point[], span: Span): Point | undefined {
  const last = points[points.length - 1];
  return last && span.end - last.at_ms <= gapOf(span) ? last : undefined;
}

function nearest(points: Point[], at: number, span: Span): Point | undefined {
  let best: Point | undefined;
  for (const each of points) if (!best || Math.abs(each.at_ms - at) < Math.abs(best.at_ms - at)) best = each;
  return best && Math.abs(best.at_ms - at) <= gapOf(span) ? best : undefined;
}

/** A line with gaps where there was nothing to measure, or nobody looked. */
function path(points: Point[], of: Line["of"], x: (at: number) => number, y: (value: number) => number, gap: number): string {
  let drawn = "";
  let before: Point | undefined;
  for (const each of points) {
    const value = of(each);
    if (value < 0) {
      before = undefined;
      continue;
    }
    const place = `${x(each.at_ms).toFixed(1)} ${y(value).toFixed(1)}`;
    // A point without neighbours is a dot.
    drawn += before && each.at_ms - before.at_ms <= gap ? `L${place}` : `M${place}h0`;
    before = each;
  }
  return drawn;
}

function niceTop(value: number, decades: boolean): number {
  if (value <= 0) return 1;
  if (decades) return 10 ** Math.max(1, Math.ceil(Math.log10(value)));
  const size = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5, 10].find((step) => step * size >= value) ?? 10) * size;
}

export function Batches({ batches }: { batches: [number, number][] }) {
  const all = batches.reduce((sum, [, each]) => sum + each, 0);
  const most = Math.max(1, ...batches.map(([, each]) => each));
  return (
    <figure class="card chart">
      <figcaption>
        <h3>Batches of the last second, by rows</h3>
        <p class="muted">{all === 0 ? "No batch ran." : `${all} ran.`}</p>
      </figcaption>
      <ul class="bars">
        {batches.slice(-12).map(([rows, each]) => (
          <li key={rows}>
            <span class="bar-name">{rows}</span>
            <svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
              <rect width={(each / most) * 100} height="8" />
            </svg>
            <span class="bar-count">{each}<span class="sr-only"> batches of {rows} rows</span></span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
