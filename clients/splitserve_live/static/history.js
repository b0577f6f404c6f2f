// The last five minutes of the scheduler: tokens, time to first token, and queue length.

import { element, text } from "./elements.js";
import { duration, number } from "./words.js";

const POINT_MS = 2_000;
const NUM_POINTS = 150;
// Dash patterns, so that lines can be distinguished without colour.
const DASHES = [[], [4, 3]];

// `valuesOf(point)`: a value for each line, null for none. `write(value)`: formats a value.
class Chart {
  constructor(name, kind, lines, valuesOf, write) {
    this.name = name;
    this.kind = kind;
    this.lines = lines;
    this.valuesOf = valuesOf;
    this.writeValue = write;
    this.root = element("figure", "chart");
    const caption = element("figcaption");
    this.latest = element("b");
    caption.append(element("span", "", name), this.latest);
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", name);
    this.most = element("span", "most");
    const axis = element("p", "axis hint");
    axis.append(element("span", "", "5 min ago"), this.most, element("span", "", "now"));
    this.root.append(caption, this.canvas, axis);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(points, colours) {
    this.points = points;
    this.colours = colours;
    const values = points.map(this.valuesOf);
    const all = values.flat().filter((value) => value !== null);
    this.highest = Math.max(0, ...all);
    const last = values.findLast(([first]) => first !== null);
    const words = (point) =>
      point
        .map((value, index) => `${this.lines[index]} ${this.writeValue(value ?? 0)}`.trim())
        .join(", ");
    text(this.latest, last ? words(last) : "–");
    text(this.most, all.length ? `max: ${this.writeValue(this.highest)}` : "nothing yet");
    const summary = last ? `now ${words(last)}, at most ${this.writeValue(this.highest)}` : "nothing yet";
    this.canvas.setAttribute("aria-label", `${this.name}, the last five minutes: ${summary}`);
    this.draw();
  }

  draw() {
    const { canvas, colours, points } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !points) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colours.line;
    context.fillRect(0, height - 1, width, 1);
    const newest = points.at(-1)?.start_ms ?? 0;
    const each = width / NUM_POINTS;
    const left = (point) => width - each * (1 + (newest - point.start_ms) / POINT_MS);
    const top = (value) => height - 1 - ((height - 6) * value) / Math.max(this.highest, 1);
    if (this.kind === "bars") {
      context.fillStyle = colours.chart[0];
      for (const point of points) {
        const [value] = this.valuesOf(point);
        if (value) context.fillRect(left(point), top(value), Math.max(1, each - 0.5), height - 1 - top(value));
      }
    } else {
      this.lines.forEach((_, line) => this.line(context, line, (point) => left(point) + each / 2, top));
    }
  }

  // Draws a line through the points; an isolated point is a dot.
  line(context, line, left, top) {
    context.strokeStyle = context.fillStyle = this.colours.chart[line];
    context.lineWidth = 1.75;
    context.setLineDash(DASHES[line]);
    context.beginPath();
    let before = null;
    for (const point of this.points) {
      const value = this.valuesOf(point)[line];
      if (value === null) continue;
      const [x, y] = [left(point), top(value)];
      context.fillRect(x - 1.25, y - 1.25, 2.5, 2.5);
      if (before !== null && point.start_ms - before <= 5 * POINT_MS) context.lineTo(x, y);
      else context.moveTo(x, y);
      before = point.start_ms;
    }
    context.stroke();
  }
}

export class History {
  constructor(root) {
    const ms = (us) => duration(us / 1000);
    this.charts = [
      new Chart("Tokens per second", "bars", [""], (point) => [(1000 * point.tokens) / POINT_MS], (value) =>
        number(Math.round(value)),
      ),
      new Chart(
        "Time to first token",
        "lines",
        ["p50", "p99"],
        (point) => (point.ttft ? [point.ttft.p50_us, point.ttft.p99_us] : [null, null]),
        ms,
      ),
      new Chart("Waiting for a row", "bars", [""], (point) => [point.waiting], number),
    ];
    root.append(...this.charts.map((chart) => chart.root));
    this.newest = null;
  }

  // Draws only if there is a new point: one every two seconds.
  show(points, colours) {
    const newest = points.at(-1)?.start_ms ?? 0;
    if (newest === this.newest && colours === this.colours) return;
    this.newest = newest;
    this.colours = colours;
    for (const chart of this.charts) chart.show(points, colours);
  }
}
