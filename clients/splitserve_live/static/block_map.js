// A pool as a map: a cell for each block, told apart by colour and by shape.

import { BLOCK_STATES } from "./words.js";

const MIN_CELL = 5;
const MAX_CELL = 16;

export class BlockMap {
  // `choose(request)`: 0 for none. `say(text)`: to who does not see.
  constructor(name, choose, say) {
    this.name = name;
    this.say = say;
    this.cursor = -1;
    this.chosen = 0;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "map";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "map of blocks");
    this.canvas.setAttribute("aria-label", name);
    this.context = this.canvas.getContext("2d");
    this.canvas.addEventListener("click", (event) => {
      this.cursor = this.blockAt(event);
      this.all();
      choose(this.pool?.holders[this.cursor] ?? 0);
      this.speak();
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event, choose));
    this.canvas.addEventListener("focus", () => this.enter());
    this.canvas.addEventListener("blur", () => this.all());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    new ResizeObserver(() => this.all()).observe(this.canvas);
  }

  show(pool, chosen, colours, nameOf) {
    this.pool = pool;
    this.colours = colours;
    this.nameOf = nameOf;
    const isNew = chosen !== this.chosen || pool.states.length !== this.length;
    this.chosen = chosen;
    this.length = pool.states.length;
    if (isNew || !this.columns || pool.changed.size > this.length / 2) this.all();
    else for (const block of pool.changed) this.draw(block);
    pool.changed.clear();
  }

  // Cells as large as fit, and as many rows as it takes.
  all() {
    const width = this.canvas.clientWidth;
    if (!this.pool || !width) return;
    const count = this.pool.states.length;
    const aim = Math.sqrt((width * Math.min(220, width * 0.6)) / Math.max(count, 1));
    this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(aim)));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const height = Math.ceil(count / this.columns) * this.cell;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.height = Math.max(1, Math.round(height * ratio));
    this.canvas.width = Math.round(width * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (let block = 0; block < count; block++) this.draw(block);
  }

  draw(block) {
    const { context, cell, colours, pool } = this;
    const state = pool.states[block];
    const left = (block % this.columns) * cell;
    const top = Math.floor(block / this.columns) * cell;
    const size = cell - 1;
    const isDimmed = this.chosen && pool.holders[block] !== this.chosen;
    context.clearRect(left, top, cell, cell);
    context.globalAlpha = isDimmed ? 0.3 : 1;
    context.fillStyle = colours.states[state];
    if (state === 3) {
      // Cached: an outline.
      context.fillRect(left, top, size, size);
      context.fillStyle = colours.page;
      context.fillRect(left + 1, top + 1, size - 2, size - 2);
      context.fillStyle = colours.states[3];
      if (cell > 7) context.fillRect(left + 3, top + 3, size - 6, size - 6);
    } else if (state === 4) {
      // Given back: the half that is still there.
      context.fillRect(left, top + Math.ceil(size / 2), size, Math.floor(size / 2));
    } else if (state === 5) {
      context.fillRect(left, top, size, size);
      context.fillStyle = colours.page;
      const middle = Math.max(1, Math.floor(size / 3));
      context.fillRect(left + middle, top + middle, size - 2 * middle, size - 2 * middle);
    } else {
      context.fillRect(left, top, size, size);
      if (state === 2) {
        // Shared: a corner is missing.
        context.clearRect(left + Math.ceil(size / 2), top, Math.floor(size / 2), Math.floor(size / 2));
      }
    }
    context.globalAlpha = 1;
    const hasFocus = document.activeElement === this.canvas;
    if (block === this.cursor && hasFocus) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, size - 1, size - 1);
    }
  }

  enter() {
    if (this.cursor < 0) this.cursor = 0;
    this.all();
    this.speak();
  }

  key(event, choose) {
    const last = (this.pool?.states.length ?? 0) - 1;
    const moves = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: this.columns,
      ArrowUp: -this.columns,
      PageDown: 8 * this.columns,
      PageUp: -8 * this.columns,
      Home: -last,
      End: last,
    };
    if (event.key in moves) {
      const next = this.cursor + moves[event.key];
      const isLeap = event.key === "Home" || event.key === "End";
      if ((next < 0 || next > last) && !isLeap && !event.key.startsWith("Page")) return;
      event.preventDefault();
      const before = this.cursor;
      this.cursor = Math.max(0, Math.min(last, next));
      this.draw(before);
      this.draw(this.cursor);
      this.speak();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(this.pool?.holders[this.cursor] ?? 0);
    } else if (event.key === "Escape") {
      choose(0);
    }
  }

  describe(block) {
    const holder = this.pool.holders[block];
    const whose = holder ? `, of ${this.nameOf(holder)}` : "";
    return `block ${block}: ${BLOCK_STATES[this.pool.states[block]]}${whose}`;
  }

  speak() {
    if (this.pool && this.cursor in this.pool.states) this.say(this.describe(this.cursor));
  }

  hover(event) {
    const block = this.blockAt(event);
    this.canvas.title = this.pool && block in this.pool.states ? this.describe(block) : "";
  }

  blockAt(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const block = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return column < this.columns && block < this.length ? block : -1;
  }
}
