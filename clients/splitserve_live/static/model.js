// Frames put together: what is the case now, and what became of requests since the page looks.

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
    // Up to which block some are not free and blank, and how many a map shows.
    this.numTouched = 0;
    this.numShown = 0;
  }

  take(told) {
    this.blockSize = told.block_size;
    if (told.num_blocks !== this.states.length) {
      this.states = new Uint8Array(told.num_blocks);
      this.holders = new Array(told.num_blocks).fill(0);
      this.counts = [told.num_blocks, 0, 0, 0, 0, 0];
      this.numTouched = this.numShown = 0;
    }
    told.changed.forEach((block, index) => {
      this.counts[this.states[block]] -= 1;
      this.states[block] = told.states[index];
      this.counts[this.states[block]] += 1;
      this.holders[block] = told.holders[index];
      this.changed.add(block);
      this.numTouched = Math.max(this.numTouched, block + 1);
    });
    while (this.numTouched && !this.states[this.numTouched - 1]) this.numTouched -= 1;
    this.fit();
  }

  // All up to the last block that is not free and blank, up to a power of two: so a map seldom
  // becomes larger, and smaller only when little of it is used.
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

  // A stream begins anew: the next frame says everything.
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
    for (const told of frame.executors) {
      let known = before.get(told.address);
      if (!known || known.told.life !== told.life) {
        known = { device: new Pool(), host: new Pool(), steps: [] };
      }
      known.told = told;
      known.device.take(told.device);
      known.host.take(told.host);
      for (const step of told.steps) {
        known.steps.push(step);
        numSampled += step.sampled;
      }
      known.steps.splice(0, Math.max(0, known.steps.length - MAX_STEPS));
      this.executors.set(told.address, known);
      this.gone.delete(told.address);
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

  // Where each request is, and since when.
  follow(frame) {
    const places = new Map();
    const place = (numbers, state, where) =>
      numbers.forEach((number) => places.set(number, { state, where }));
    place(frame.waiting, "waits", "");
    for (const told of frame.executors) {
      place(told.waiting, "waits", told.address);
      place(told.swapped, "is swapped out", told.address);
      place(told.running, "runs", told.address);
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
      const isTold = places.has(life.number);
      // Of a long queue the first are told: who is not among them may wait.
      if (!isTold && life.state && life.state !== "waits") {
        this.note(life, frame.now_ms, "is over");
        life.state = "";
        life.overMs = frame.now_ms;
      }
    }
    for (const { told } of this.executors.values()) {
      told.running.forEach((number, index) => {
        const life = this.life(number);
        life.tokens = told.tokens[index];
        life.computed = told.computed[index];
      });
      for (const step of told.steps) {
        step.requests.forEach((number, index) => {
          const life = this.lives.get(number);
          if (!life) return;
          life.steps += 1;
          if (step.kinds[index] === 1 && !life.hasBegun) {
            life.hasBegun = true;
            this.note(life, step.sent_ms, `its first step, ${step.tokens[index]} tokens of its prompt`);
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
