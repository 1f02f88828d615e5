// Charts as SVG: few points and few lines, colours and sizes from the style sheet, words for who does not see them.
import { useState } from "preact/hooks";
import { clock, measure } from "./format";
import type { Point } from "./types";

const WIDTH = 320;
const HEIGHT = 120;
type Field = Exclude<keyof Point, "at_ms">;

interface LinesProps {
  title: string;
  points: Point[];
  series: [string, Field][];
  unit: string;
}

export function Lines({ title, points, series, unit }: LinesProps) {
  const [at, setAt] = useState<number | null>(null);
  const shown = at === null ? points[points.length - 1] : points[at];
  const most = niceTop(Math.max(...points.flatMap((point) => series.map(([, field]) => point[field])), 0));
  const x = (index: number) => (points.length < 2 ? 0 : (index / (points.length - 1)) * WIDTH);
  const y = (value: number) => HEIGHT - (value / most) * HEIGHT;
  const values = shown ? series.map(([name, field]) => `${name} ${measure(shown[field])}${unit && ` ${unit}`}`).join(", ") : "no readings yet";

  const move = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const index = Math.round(((event.clientX - box.left) / box.width) * (points.length - 1));
    setAt(Math.max(0, Math.min(points.length - 1, index)));
  };
  return (
    <figure class="card chart">
      <figcaption>
        <h3>{title}</h3>
        <ul class="legend">
          {series.map(([name, field], index) => (
            <li key={name} class={`series-${index}`}>
              <svg width="18" height="8" aria-hidden="true"><line x1="0" y1="4" x2="18" y2="4" /></svg>
              {name} <b>{shown ? measure(shown[field]) : "–"}</b>{unit && ` ${unit}`}
            </li>
          ))}
        </ul>
      </figcaption>
      <div class="plot">
        <span class="axis axis-max">{measure(most)}</span>
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          role="img"
          aria-label={`${title}: ${values}`}
          onPointerMove={move}
          onPointerLeave={() => setAt(null)}
        >
          <line class="grid" x1="0" y1={HEIGHT / 2} x2={WIDTH} y2={HEIGHT / 2} />
          <line class="grid" x1="0" y1={HEIGHT} x2={WIDTH} y2={HEIGHT} />
          {series.map(([name, field], index) => (
            <path key={name} class={`line series-${index}`} d={path(points.map((point) => point[field]), x, y)} />
          ))}
          {at !== null && <line class="cursor" x1={x(at)} y1="0" x2={x(at)} y2={HEIGHT} />}
        </svg>
        <div class="row axis-time">
          <span class="axis">{points[0] ? clock(points[0].at_ms) : ""}</span>
          <span class="axis">{shown ? clock(shown.at_ms) : ""}</span>
        </div>
      </div>
    </figure>
  );
}

/** A line with gaps where there was nothing to measure. */
function path(values: number[], x: (index: number) => number, y: (value: number) => number): string {
  let drawn = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value < 0) {
      pen = "M";
      return;
    }
    drawn += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return drawn;
}

export function niceTop(value: number): number {
  if (value <= 0) return 1;
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
