// State combined from frames: the present, and requests since the page was opened.

const MAX_STEPS = 160;
const MAX_LIVES = 2_000;
const MAX_EVENTS = 64;
const GONE_MS = 60_000;
const MAX_POINTS = 150;
// Minimum number of blocks that a map shows.
const LEAST_SHOWN = 64;

class Pool {
  constructor() {
    this.states = new Uint8Array(0);
    this.holders = [];
    this.blockSize = 0;
    this.counts = [0, 0, 0, 0, 0, 0];
    this.changed = new Set();
    // End of the blocks that are not free and empty, and number of blocks that a map shows.
    this.numTouched = 0;
    this.numShown = 0;
  }

  take(pool) {
    this.blockSize = pool.block_size;
    if (pool.num_blocks !== this.states.length) {
      this.states = new Uint8Array(pool.num_blocks);
      this.holders = new Array(pool.num_blocks).fill(0);
      this.counts = [pool.num_blocks, 0, 0, 0, 0, 0];
      this.numTouched = this.numShown = 0;
    }
    pool.changed.forEach((block, index) => {
      this.counts[this.states[block]] -= 1;
      this.states[block] = pool.states[index];
      this.counts[this.states[block]] += 1;
      this.holders[block] = pool.holders[index];
      this.changed.add(block);
      this.numTouched = Math.max(this.numTouched, block + 1);
    });
    while (this.numTouched && !this.states[this.numTouched - 1]) this.numTouched -= 1;
    this.fit();
  }

  // Shows all up to the last block that is not free and empty, rounded up to a power of two. So a map
  // seldom grows, and shrinks only when little of it is used.
  fit() {
    let wanted = LEAST_SHOWN;
    while (wanted < this.numTouched) wanted *= 2;
    wanted = Math.min(wanted, this.states.length);
    if (wanted > this.numShown || 4 * wanted <= this.numShown) this.numShown = wanted;
  }

  blocksOf(request) {
    return this.holders.reduce((sum, holder) => sum + (holder === request ? 1 : 0), 0);
  }
}

export class Model {
  constructor() {
    this.lives = new Map();
    this.gone = new Map();
    this.begin();
  }

  // Prepares for a new stream, whose first frame has the complete state.
  begin() {
    this.names = new Map();
    this.executors = new Map();
    this.frame = null;
    this.tokensPerSecond = 0;
    this.samples = [];
    this.history = [];
  }

  take(frame) {
    this.frame = frame;
    this.history.push(...frame.history);
    this.history.splice(0, Math.max(0, this.history.length - MAX_POINTS));
    if (frame.forgets) this.names.clear();
    for (const request of frame.requests) {
      this.names.set(request.number, request);
      const life = this.lives.get(request.number);
      if (life) life.name = request;
    }
    const before = this.executors;
    this.executors = new Map();
    let numSampled = 0;
    for (const status of frame.executors) {
      let known = before.get(status.address);
      if (!known || known.status.life !== status.life) {
        known = { device: new Pool(), host: new Pool(), steps: [] };
      }
      known.status = status;
      known.device.take(status.device);
      known.host.take(status.host);
      for (const step of status.steps) {
        known.steps.push(step);
        numSampled += step.sampled;
      }
      known.steps.splice(0, Math.max(0, known.steps.length - MAX_STEPS));
      this.executors.set(status.address, known);
      this.gone.delete(status.address);
    }
    for (const address of before.keys()) {
      if (!this.executors.has(address)) this.gone.set(address, frame.now_ms);
    }
    for (const [address, since] of this.gone) {
      if (frame.now_ms - since > GONE_MS || frame.now_ms < since) this.gone.delete(address);
    }
    this.measure(frame.now_ms, numSampled);
    this.follow(frame);
  }

  measure(nowMs, numSampled) {
    this.samples.push([nowMs, numSampled]);
    while (this.samples.length > 1 && nowMs - this.samples[0][0] > 3_000) this.samples.shift();
    const spanMs = nowMs - this.samples[0][0];
    const sum = this.samples.slice(1).reduce((total, [, count]) => total + count, 0);
    this.tokensPerSecond = spanMs > 0 ? (1_000 * sum) / spanMs : 0;
  }

  // Records where each request is, and since when.
  follow(frame) {
    const places = new Map();
    const place = (numbers, state, where) =>
      numbers.forEach((number) => places.set(number, { state, where }));
    place(frame.waiting, "waiting", "");
    for (const status of frame.executors) {
      place(status.waiting, "waiting", status.address);
      place(status.swapped, "swapped out", status.address);
      place(status.running, "running", status.address);
    }
    for (const [number, { state, where }] of places) {
      const life = this.life(number);
      if (life.state !== state || life.where !== where) {
        const moved = life.state && life.where && where && life.where !== where;
        const what = state + (where ? (state === "running" ? ` on ${where}` : ` at ${where}`) : "");
        this.note(life, frame.now_ms, moved ? `moved: ${what}` : what);
        life.state = state;
        life.where = where;
      }
    }
    for (const life of this.lives.values()) {
      const isListed = places.has(life.number);
      // The feed lists the first of a long queue; other requests may wait, too.
      if (!isListed && life.state && life.state !== "waiting") {
        this.note(life, frame.now_ms, "ended");
        life.state = "";
        life.overMs = frame.now_ms;
      }
    }
    for (const { status } of this.executors.values()) {
      status.running.forEach((number, index) => {
        const life = this.life(number);
        life.tokens = status.tokens[index];
        life.computed = status.computed[index];
      });
      for (const step of status.steps) {
        step.requests.forEach((number, index) => {
          const life = this.lives.get(number);
          if (!life) return;
          life.steps += 1;
          if (step.kinds[index] === 1 && !life.hasBegun) {
            life.hasBegun = true;
            this.note(life, step.sent_ms, `first step, ${step.tokens[index]} prompt tokens`);
          }
        });
      }
    }
  }

  life(number) {
    let life = this.lives.get(number);
    if (!life) {
      life = { number, state: "", where: "", events: [], steps: 0, tokens: 0, computed: 0 };
      life.name = this.names.get(number) ?? { number, id: `#${number}`, tenant: "" };
      this.lives.set(number, life);
      if (this.lives.size > MAX_LIVES) this.lives.delete(this.lives.keys().next().value);
    }
    return life;
  }

  note(life, atMs, what) {
    life.events.push({ atMs, what });
    if (life.events.length > MAX_EVENTS) life.events.splice(1, 1);
  }

  idOf(number) {
    return this.names.get(number)?.id ?? this.lives.get(number)?.name.id ?? `#${number}`;
  }
}
