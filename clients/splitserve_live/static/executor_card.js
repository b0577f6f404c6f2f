// Card of one executor: numbers, blocks, steps.

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
    // The map of an unused pool would be empty.
    this.host.canvas.hidden = known.host.numTouched === 0;
    if (!this.hostPart.hidden) this.host.show(known.host, chosen, colours, nameOf);
    this.steps.show(known.steps, chosen, colours, nameOf);
  }

  // Updates texts; called less often than `draw`.
  write(known, nameOf) {
    const { latest, device, host, steps } = known;
    this.root.classList.remove("lost");
    text(this.state, STATES[latest.state] ?? latest.state);
    this.state.dataset.state = latest.state;
    const facts = [
      `${number(new Set(latest.running).size)} running in ${latest.running.length} of ${latest.rows} rows`,
      `${number(latest.num_waiting)} waiting`,
      `${number(latest.swapped.length)} swapped`,
      counted(latest.num_steps, "step"),
      counted(latest.preemptions, "preemption"),
    ];
    text(this.facts, facts.join(" · "));
    const next = latest.swapped[0] ?? latest.waiting[0] ?? 0;
    this.reason.classList.toggle("none", !latest.reason);
    text(this.next, latest.reason ? nameOf(next) : "");
    text(this.nextWhy, latest.reason ? `: ${why(latest.reason)}.` : "");
    this.deviceText.write(device, this.device.perCell);
    this.hostText.write(host, this.host.perCell);
    this.stepText.write(steps.at(-1));
  }

  lose(ageMs) {
    this.root.classList.add("lost");
    text(this.state, `lost ${Math.round(ageMs / 1000)} s ago`);
    this.state.dataset.state = "lost";
    text(this.facts, "Its requests continue elsewhere, or wait for an executor.");
    this.reason.classList.add("none");
  }
}

// Number of blocks of a pool in each state, with the marks of the map.
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

// The latest step, with the marks of its rows.
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
