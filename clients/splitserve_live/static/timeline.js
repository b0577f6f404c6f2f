// The latest steps of an executor: a column for each step, a cell for each row.

import { ROW_KINDS, counted, duration } from "./words.js";

const HEIGHT = 84;
const COLUMN = 8;

export class Timeline {
  constructor(name, choose, say) {
    this.say = say;
    this.steps = [];
    // Step id, so that the cursor stays at its step when new steps arrive.
    this.cursor = null;
    this.row = 0;
    this.chosen = 0;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "steps";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "steps over time");
    this.canvas.setAttribute("aria-label", name);
    this.context = this.canvas.getContext("2d");
    this.canvas.addEventListener("click", (event) => {
      this.point(event);
      this.draw();
      choose(this.step()?.requests[this.row] ?? 0);
      this.speak();
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event, choose));
    this.canvas.addEventListener("focus", () => {
      this.cursor ??= this.steps.at(-1)?.id ?? null;
      this.draw();
      this.speak();
    });
    this.canvas.addEventListener("blur", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(steps, chosen, colours, nameOf) {
    this.steps = steps;
    this.chosen = chosen;
    this.colours = colours;
    this.nameOf = nameOf;
    this.draw();
  }

  visible() {
    const count = Math.max(1, Math.floor(this.canvas.clientWidth / COLUMN));
    return this.steps.slice(-count);
  }

  draw() {
    const { context, canvas, colours } = this;
    const width = canvas.clientWidth;
    if (!width || !colours) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = HEIGHT * ratio;
    canvas.style.height = `${HEIGHT}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const steps = this.visible();
    const most = Math.max(8, ...steps.map((step) => step.num_rows));
    this.rowHeight = (HEIGHT - 10) / most;
    this.left = width - steps.length * COLUMN;
    steps.forEach((step, index) => this.column(step, this.left + index * COLUMN));
  }

  column(step, left) {
    const { context, colours, rowHeight } = this;
    const gap = rowHeight > 3 ? 1 : 0;
    step.kinds.forEach((kind, row) => {
      const isDimmed = this.chosen && step.requests[row] !== this.chosen;
      context.globalAlpha = isDimmed ? 0.25 : 1;
      context.fillStyle = colours.kinds[kind] ?? colours.text;
      const top = HEIGHT - 6 - (row + 1) * rowHeight;
      // Rows with one token are narrow, rows with several are wide.
      const inset = kind === 2 ? 2 : 0;
      const wide = COLUMN - 1 - 2 * inset;
      context.fillRect(left + inset, top, wide, Math.max(1, rowHeight - gap));
    });
    context.globalAlpha = 1;
    if (step.out || step.in || step.copied || step.failed) {
      context.fillStyle = step.failed ? colours.text : colours.states[5];
      context.fillRect(left, HEIGHT - 4, COLUMN - 1, 4);
    }
    if (step.id === this.cursor && document.activeElement === this.canvas) {
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(left - 1, 1, COLUMN + 1, HEIGHT - 2);
    }
  }

  step() {
    return this.steps.find((step) => step.id === this.cursor);
  }

  point(event) {
    const steps = this.visible();
    const step = steps[Math.floor((event.offsetX - this.left) / COLUMN)];
    this.cursor = step?.id ?? null;
    const row = Math.floor((HEIGHT - 6 - event.offsetY) / this.rowHeight);
    this.row = Math.max(0, Math.min((step?.requests.length ?? 1) - 1, row));
  }

  key(event, choose) {
    const index = this.steps.findIndex((step) => step.id === this.cursor);
    const numRows = this.steps[index]?.requests.length ?? 0;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = index < 0 ? this.steps.length - 1 : index + (event.key === "ArrowLeft" ? -1 : 1);
      this.cursor = this.steps[Math.max(0, Math.min(this.steps.length - 1, next))]?.id ?? null;
      this.row = 0;
    } else if (event.key === "End") {
      this.cursor = this.steps.at(-1)?.id ?? null;
    } else if (event.key === "ArrowUp") {
      this.row = Math.min(numRows - 1, this.row + 1);
    } else if (event.key === "ArrowDown") {
      this.row = Math.max(0, this.row - 1);
    } else if (event.key === "Enter" || event.key === " ") {
      choose(this.step()?.requests[this.row] ?? 0);
    } else {
      return;
    }
    event.preventDefault();
    this.draw();
    this.speak();
  }

  speak() {
    const step = this.step();
    if (!step) return;
    const request = step.requests[this.row];
    const row = request
      ? `; row ${this.row + 1}: ${this.nameOf(request)}, ${ROW_KINDS[step.kinds[this.row]]}, ${counted(step.tokens[this.row], "token")}`
      : "";
    this.say(`${describeStep(step)}${row}`);
  }
}

function describeStep(step) {
  const rows = kindsOf(step).map(([kind, count]) => `${count} ${ROW_KINDS[kind]}`);
  return [`step ${step.id}: ${rows.join(", ") || "no rows"}`, ...restOf(step)].join(", ");
}

// Returns the number of rows of each kind.
export function kindsOf(step) {
  const counts = new Map();
  for (const kind of step.kinds) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  return [...counts].sort();
}

// Returns the step's duration, and its block moves.
export function restOf(step) {
  const moves = [
    [step.out, "out"],
    [step.in, "in"],
    [step.copied, "copied"],
  ].filter(([count]) => count);
  return [
    duration(step.round_trip_us / 1000),
    ...moves.map(([count, how]) => `${counted(count, "block")} ${how}`),
    ...(step.failed ? ["failed"] : []),
  ];
}
