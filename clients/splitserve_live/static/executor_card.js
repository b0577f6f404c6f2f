// One executor: what it does in numbers, its blocks, its steps.

import { BlockMap } from "./block_map.js";
import { Timeline, describeStep } from "./timeline.js";
import { BLOCK_STATES, number, why } from "./words.js";

const STATES = {
  serving: "serving",
  late: "late: a step takes longer than such steps took",
  draining: "draining",
  disconnected: "disconnected",
};

export class ExecutorCard {
  constructor(address, choose, say) {
    this.root = element("article", "card");
    const heading = element("h2", "", address);
    this.state = element("span", "pill");
    this.facts = element("p", "facts");
    this.reason = element("p", "reason");
    this.device = new BlockMap(`Device blocks of ${address}`, choose, say);
    this.host = new BlockMap(`Host blocks of ${address}`, choose, say);
    this.deviceText = element("p", "counts");
    this.hostText = element("p", "counts");
    this.steps = new Timeline(`Steps of ${address}`, choose, say);
    this.stepText = element("p", "counts");
    const head = element("div", "head");
    head.append(heading, this.state);
    this.hostPart = element("div");
    this.hostPart.append(element("h3", "", "KV blocks on the host"), this.host.canvas, this.hostText);
    this.root.setAttribute("aria-label", `Executor ${address}`);
    this.root.append(
      head,
      this.facts,
      this.reason,
      element("h3", "", "KV blocks on the device"),
      this.device.canvas,
      this.deviceText,
      this.hostPart,
      element("h3", "", "Steps"),
      this.steps.canvas,
      this.stepText,
    );
  }

  draw(known, chosen, colours, nameOf) {
    this.device.show(known.device, chosen, colours, nameOf);
    this.hostPart.hidden = known.host.states.length === 0;
    if (!this.hostPart.hidden) this.host.show(known.host, chosen, colours, nameOf);
    this.steps.show(known.steps, chosen, colours, nameOf);
  }

  // What is read; rarer than what is drawn.
  write(known) {
    const { told, device, host, steps } = known;
    this.root.classList.remove("lost");
    text(this.state, STATES[told.state] ?? told.state);
    this.state.dataset.state = told.state;
    const facts = [
      `${number(new Set(told.running).size)} running in ${told.running.length} of ${told.rows} rows`,
      `${number(told.num_waiting)} waiting`,
      `${number(told.swapped.length)} swapped`,
      `${number(told.num_steps)} steps`,
      `${number(told.preemptions)} preemptions`,
    ];
    text(this.facts, facts.join(" · "));
    text(this.reason, told.reason ? `Next here: ${why(told.reason)}.` : "");
    text(this.deviceText, counts(device));
    text(this.hostText, counts(host));
    text(this.stepText, steps.length ? describeStep(steps.at(-1)) : "no steps yet");
  }

  lose(ageMs) {
    this.root.classList.add("lost");
    text(this.state, `lost ${Math.round(ageMs / 1000)} s ago`);
    this.state.dataset.state = "lost";
    text(this.facts, "Its requests go on elsewhere, or wait for an executor.");
    text(this.reason, "");
  }
}

function counts(pool) {
  const parts = pool.counts.map((count, state) => `${number(count)} ${BLOCK_STATES[state]}`);
  const shown = parts.filter((_, state) => state === 0 || pool.counts[state]);
  return `${number(pool.states.length)} blocks of ${pool.blockSize} tokens: ${shown.join(", ")}`;
}

export function element(name, className = "", content = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

export function text(node, content) {
  if (node.textContent !== content) node.textContent = content;
}
