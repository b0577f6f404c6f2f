// Current state combined from frames, and events of requests since the page was opened.

const MAX_STEPS = 160;
const MAX_LIVES = 2_000;
const MAX_EVENTS = 64;
const GONE_MS = 60_000;
const MAX_POINTS = 150;
// Blocks that a map shows even if all are free.
const LEAST_SHOWN = 64;

class Pool {
  constructor() {
    this.states = new Uint8Array(0);
    this.holders = [];
    this.blockSize = 0;
    this.counts = [0, 0, 0, 0, 0, 0];
    this.changed = new Set();
    // All blocks from `numTouched` on are free and empty; a map shows `numShown` blocks.
    this.numTouched = 0;
    this.numShown = 0;
  }

  take(changes) {
    this.blockSize = changes.block_size;
    if (changes.num_blocks !== this.states.length) {
      this.states = new Uint8Array(changes.num_blocks);
      this.holders = new Array(changes.num_blocks).fill(0);
      this.counts = [changes.num_blocks, 0, 0, 0, 0, 0];
      this.numTouched = this.numShown = 0;
    }
    changes.changed.forEach((block, index) => {
      this.counts[this.states[block]] -= 1;
      this.states[block] = changes.states[index];
      this.counts[this.states[block]] += 1;
      this.holders[block] = changes.holders[index];
      this.changed.add(block);
      this.numTouched = Math.max(this.numTouched, block + 1);
    });
    while (this.numTouched && !this.states[this.numTouched - 1]) this.numTouched -= 1;
    this.fit();
  }

  // Shows all blocks up to the last that is not free and empty, rounded up to a power of two: the map
  // grows rarely, and shrinks only if little of it is used.
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

  // Resets the state for a new stream, whose first frame contains everything.
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
    for (const executor of frame.executors) {
      let known = before.get(executor.address);
      if (!known || known.latest.life !== executor.life) {
        known = { device: new Pool(), host: new Pool(), steps: [] };
      }
      known.latest = executor;
      known.device.take(executor.device);
      known.host.take(executor.host);
      for (const step of executor.steps) {
        known.steps.push(step);
        numSampled += step.sampled;
      }
      known.steps.splice(0, Math.max(0, known.steps.length - MAX_STEPS));
      this.executors.set(executor.address, known);
      this.gone.delete(executor.address);
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

  // Updates the place of each request, and its events.
  follow(frame) {
    const places = new Map();
    const place = (numbers, state, where) =>
      numbers.forEach((number) => places.set(number, { state, where }));
    place(frame.waiting, "waits", "");
    for (const executor of frame.executors) {
      place(executor.waiting, "waits", executor.address);
      place(executor.swapped, "is swapped out", executor.address);
      place(executor.running, "runs", executor.address);
    }
    for (const [number, { state, where }] of places) {
      const life = this.life(number);
      if (life.state !== state || life.where !== where) {
        const moved = life.state && life.where && where && life.where !== where;
        const what = state + (where ? (state === "runs" ? ` on ${where}` : ` at ${where}`) : "");
        this.note(life, frame.now_ms, moved ? `moves: ${what}` : what);
        life.state = state;
        life.where = where;
      }
    }
    for (const life of this.lives.values()) {
      // Frames contain only the first requests of a long queue: an absent one may still wait.
      if (!places.has(life.number) && life.state && life.state !== "waits") {
        this.note(life, frame.now_ms, "ended");
        life.state = "";
        life.endedMs = frame.now_ms;
      }
    }
    for (const { latest } of this.executors.values()) {
      latest.running.forEach((number, index) => {
        const life = this.life(number);
        life.tokens = latest.tokens[index];
        life.computed = latest.computed[index];
      });
      for (const step of latest.steps) {
        step.requests.forEach((number, index) => {
          const life = this.lives.get(number);
          if (!life) return;
          life.steps += 1;
          if (step.kinds[index] === 1 && !life.hasBegun) {
            life.hasBegun = true;
            this.note(life, step.sent_ms, `first step, with ${step.tokens[index]} prompt tokens`);
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
