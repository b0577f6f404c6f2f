// One executor: its numbers, its blocks, its steps.

import { BlockMap } from "./block_map.js";
import { element, fill, sign, text } from "./elements.js";
import { Timeline, kindsOf, restOf } from "./timeline.js";
import { BLOCK_STATES, ROW_KINDS, counted, number, why } from "./words.js";

const STATES = {
  serving: "serving",
  late: "late: a step takes longer than expected",
  draining: "draining",
  disconnected: "disconnected",
  withdrawn: "withdrawn: its steps or rows fail",
};

export class ExecutorCard {
  constructor(address, choose, say) {
    this.root = element("article", "card");
    const heading = element("h2", "", address);
    this.state = element("span", "pill");
    this.facts = element("p", "facts");
    this.reason = element("p", "reason");
    this.next = element("bdi");
    this.nextWhy = element("span");
    this.reason.append("Next here is ", this.next, this.nextWhy);
    this.device = new BlockMap(`Device blocks of ${address}`, choose, say);
    this.host = new BlockMap(`Host blocks of ${address}`, choose, say);
    this.deviceText = new PoolCounts();
    this.hostText = new PoolCounts();
    this.steps = new Timeline(`Steps of ${address}`, choose, say);
    this.stepText = new StepText();
    const head = element("div", "head");
    head.append(heading, this.state);
    this.hostPart = element("div");
    this.hostPart.append(
      element("h3", "", "KV blocks on the host"),
      this.host.canvas,
      this.hostText.root,
    );
    this.root.setAttribute("aria-label", `Executor ${address}`);
    this.root.append(
      head,
      this.facts,
      this.reason,
      element("h3", "", "Steps"),
      this.steps.canvas,
      this.stepText.root,
      element("h3", "", "KV blocks on the device"),
      this.device.canvas,
      this.deviceText.root,
      this.hostPart,
    );
  }

  draw(known, chosen, colours, nameOf) {
    this.device.show(known.device, chosen, colours, nameOf);
    this.hostPart.hidden = known.host.states.length === 0;
    // An unused pool needs no map.
    this.host.canvas.hidden = known.host.numTouched === 0;
    if (!this.hostPart.hidden) this.host.show(known.host, chosen, colours, nameOf);
    this.steps.show(known.steps, chosen, colours, nameOf);
  }

  // Writes the texts, less often than the canvases are drawn.
  write(known, nameOf) {
    const { status, device, host, steps } = known;
    this.root.classList.remove("lost");
    text(this.state, STATES[status.state] ?? status.state);
    this.state.dataset.state = status.state;
    const facts = [
      `${number(new Set(status.running).size)} running in ${status.running.length} of ${status.rows} rows`,
      `${number(status.num_waiting)} waiting`,
      `${number(status.swapped.length)} swapped`,
      counted(status.num_steps, "step"),
      counted(status.preemptions, "preemption"),
    ];
    text(this.facts, facts.join(" · "));
    const next = status.swapped[0] ?? status.waiting[0] ?? 0;
    this.reason.classList.toggle("none", !status.reason);
    text(this.next, status.reason ? nameOf(next) : "");
    text(this.nextWhy, status.reason ? `: ${why(status.reason)}.` : "");
    this.deviceText.write(device, this.device.perCell);
    this.hostText.write(host, this.host.perCell);
    this.stepText.write(steps.at(-1));
  }

  lose(ageMs) {
    this.root.classList.add("lost");
    text(this.state, `lost ${Math.round(ageMs / 1000)} s ago`);
    this.state.dataset.state = "lost";
    text(this.facts, "Its requests continue on other executors, or wait for one.");
    this.reason.classList.add("none");
  }
}

// Number of blocks of a pool in each state, with the sign of the state in the map.
class PoolCounts {
  constructor() {
    this.root = element("p", "counts");
    this.size = element("span");
    this.states = BLOCK_STATES.map((_, state) => sign(`block block-${state}`));
    this.root.append(this.size, ...this.states.flatMap((each) => [" ", each]));
  }

  write(pool, perCell) {
    const shown = pool.numShown < pool.states.length ? `, the first ${number(pool.numShown)} shown` : "";
    const each = perCell > 1 ? `, ${perCell} in a cell` : "";
    const isBlank = pool.numTouched === 0;
    const rest = isBlank ? ", all free" : `${shown}${each}:`;
    text(this.size, `${number(pool.states.length)} blocks of ${pool.blockSize} tokens${rest}`);
    this.states.forEach((each, state) => {
      const count = pool.counts[state];
      each.hidden = isBlank;
      each.classList.toggle("none", !count);
      text(each.lastChild, `${number(count)} ${BLOCK_STATES[state]}`);
    });
  }
}

// The latest step, with the signs of its rows.
class StepText {
  constructor() {
    this.root = element("p", "counts");
    this.name = element("span");
    this.kinds = element("span");
    this.rest = element("span");
    this.root.append(this.name, " ", this.kinds, " ", this.rest);
  }

  write(step) {
    text(this.name, step ? `step ${step.id}:` : "no steps yet");
    fill(this.kinds, step ? kindsOf(step) : [], () => sign(""), (each, [kind, count]) => {
      each.firstChild.className = `row row-${kind}`;
      text(each.lastChild, `${count} ${ROW_KINDS[kind]}`);
    });
    text(this.rest, step ? restOf(step).join(", ") : "");
  }
}
