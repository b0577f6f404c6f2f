// Map of a pool: a cell for each block, whose colour and shape show its state. The map covers the
// used part of the pool. In a large pool a cell stands for several blocks, and shows their most
// frequent state.

import { BLOCK_STATES, counted, number } from "./words.js";

const MIN_CELL = 5;
const MAX_CELL = 16;
const MAX_HEIGHT = 160;

export class BlockMap {
  // `choose(request)`: selects a request, 0 for none. `say(text)`: announces text to screen readers.
  constructor(name, choose, say) {
    this.name = name;
    this.say = say;
    // Indices of cells.
    this.cursor = -1;
    this.perCell = 1;
    this.numCells = 0;
    this.chosen = 0;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "map";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "map of blocks");
    this.canvas.setAttribute("aria-label", name);
    this.context = this.canvas.getContext("2d");
    this.canvas.addEventListener("click", (event) => {
      this.cursor = this.cellAt(event);
      this.all();
      choose(this.holder());
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
    const isNew = chosen !== this.chosen || pool.numShown !== this.length;
    this.chosen = chosen;
    this.length = pool.numShown;
    if (isNew || !this.columns || pool.changed.size > this.length / 2) this.all();
    else {
      const cells = new Set();
      for (const block of pool.changed) {
        if (block < this.length) cells.add(Math.floor(block / this.perCell));
      }
      for (const cell of cells) this.draw(cell);
    }
    pool.changed.clear();
  }

  // Draws all cells, as large as fit; at the minimum size several blocks share a cell.
  all() {
    const width = this.canvas.clientWidth;
    if (!this.pool || !width) return;
    const count = this.pool.numShown;
    const room = Math.min(MAX_HEIGHT, width * 0.6);
    const aim = Math.sqrt((width * room) / Math.max(count, 1));
    this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(aim)));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const most = this.columns * Math.max(1, Math.floor(room / this.cell));
    const isAtMinimum = this.cell === MIN_CELL;
    this.perCell = isAtMinimum ? Math.max(1, Math.ceil(count / most)) : 1;
    this.numCells = Math.ceil(count / this.perCell);
    this.cursor = Math.min(this.cursor, this.numCells - 1);
    const height = Math.ceil(this.numCells / this.columns) * this.cell;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.height = Math.max(1, Math.round(height * ratio));
    this.canvas.width = Math.round(width * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (let cell = 0; cell < this.numCells; cell++) this.draw(cell);
  }

  // Returns the range of blocks of a cell: [first, end).
  blocks(cell) {
    return [cell * this.perCell, Math.min((cell + 1) * this.perCell, this.pool.numShown)];
  }

  // Returns the number of blocks of a cell in each state.
  counts(cell) {
    const counts = [0, 0, 0, 0, 0, 0];
    const [first, end] = this.blocks(cell);
    for (let block = first; block < end; block++) counts[this.pool.states[block]] += 1;
    return counts;
  }

  // Returns the block that represents a cell: one of the selected request, or one of the most
  // frequent state.
  representative(cell) {
    const [first, end] = this.blocks(cell);
    if (end - first === 1) return first;
    const mine = this.chosen ? this.pool.holders.indexOf(this.chosen, first) : -1;
    if (mine >= 0 && mine < end) return mine;
    const counts = this.counts(cell);
    return this.pool.states.indexOf(counts.indexOf(Math.max(...counts)), first);
  }

  draw(cell) {
    const { context, colours, pool } = this;
    const block = this.representative(cell);
    const left = (cell % this.columns) * this.cell;
    const top = Math.floor(cell / this.columns) * this.cell;
    const size = this.cell - 1;
    const isDimmed = this.chosen && pool.holders[block] !== this.chosen;
    context.clearRect(left, top, this.cell, this.cell);
    context.globalAlpha = isDimmed ? 0.3 : 1;
    this.shape(pool.states[block], left, top, size);
    context.globalAlpha = 1;
    const hasFocus = document.activeElement === this.canvas;
    if (cell === this.cursor && hasFocus) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, size - 1, size - 1);
    }
  }

  // Shapes differ even in cells of four pixels.
  shape(state, left, top, size) {
    const { context, colours } = this;
    context.fillStyle = colours.states[state];
    if (state === 3) {
      // Cached: an outline.
      context.fillRect(left, top, size, size);
      context.fillStyle = colours.page;
      context.fillRect(left + 1, top + 1, size - 2, size - 2);
      context.fillStyle = colours.states[3];
      if (size > 6) context.fillRect(left + 3, top + 3, size - 6, size - 6);
    } else if (state === 4) {
      // Given back: the lower half.
      context.fillRect(left, top + Math.ceil(size / 2), size, Math.floor(size / 2));
    } else if (state === 5) {
      // On the move: an arrow.
      context.beginPath();
      context.moveTo(left, top);
      context.lineTo(left + size, top + size / 2);
      context.lineTo(left, top + size);
      context.fill();
    } else {
      context.fillRect(left, top, size, size);
      if (state === 2) {
        // Shared: a corner is missing.
        context.clearRect(left + Math.ceil(size / 2), top, Math.floor(size / 2), Math.floor(size / 2));
      }
    }
  }

  enter() {
    if (this.cursor < 0) this.cursor = 0;
    this.all();
    this.speak();
  }

  key(event, choose) {
    const last = this.numCells - 1;
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
      choose(this.holder());
    }
  }

  // Returns the request that holds most blocks of the cell at the cursor; 0 for none.
  holder() {
    if (!this.pool || this.cursor < 0) return 0;
    const counts = new Map();
    const [first, end] = this.blocks(this.cursor);
    for (const holder of this.pool.holders.slice(first, end)) {
      if (holder) counts.set(holder, (counts.get(holder) ?? 0) + 1);
    }
    return [...counts].sort((one, other) => other[1] - one[1])[0]?.[0] ?? 0;
  }

  describe(cell) {
    const [first, end] = this.blocks(cell);
    const holders = new Set(this.pool.holders.slice(first, end));
    holders.delete(0);
    const [holder] = holders;
    if (end - first === 1) {
      const whose = holder ? `, of ${this.nameOf(holder)}` : "";
      return `block ${first}: ${BLOCK_STATES[this.pool.states[first]]}${whose}`;
    }
    const counts = this.counts(cell);
    const states = counts.map((count, state) => count && `${number(count)} ${BLOCK_STATES[state]}`);
    const whose = holders.size > 1 ? `, of ${counted(holders.size, "request")}` : "";
    const only = holders.size === 1 ? `, of ${this.nameOf(holder)}` : whose;
    return `blocks ${first} to ${end - 1}: ${states.filter(Boolean).join(", ")}${only}`;
  }

  speak() {
    if (this.pool && this.cursor >= 0) this.say(this.describe(this.cursor));
  }

  hover(event) {
    const cell = this.cellAt(event);
    this.canvas.title = this.pool && cell >= 0 ? this.describe(cell) : "";
  }

  cellAt(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const cell = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return column < this.columns && cell < this.numCells ? cell : -1;
  }
}
