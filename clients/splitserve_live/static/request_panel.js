// The queue, and the life of the request that was chosen.

import { element, text } from "./executor_card.js";
import { duration, number, why } from "./words.js";

export class Queue {
  constructor(choose) {
    this.choose = choose;
    this.list = document.getElementById("queue");
    this.why = document.getElementById("why");
    this.more = document.getElementById("more");
  }

  write(model, chosen) {
    const { frame } = model;
    const here = frame.executors.flatMap((told) => told.waiting);
    const numHere = frame.executors.reduce((sum, told) => sum + told.num_waiting, 0);
    const numbers = [...frame.waiting, ...here];
    const total = frame.num_waiting + numHere;
    text(this.why, whyNext(model));
    const shown = numbers.slice(0, 12);
    while (this.list.children.length > shown.length) this.list.lastChild.remove();
    shown.forEach((request, index) => this.item(index, request, model, chosen));
    const quarantined = frame.num_quarantined ? `, ${frame.num_quarantined} in quarantine` : "";
    const rest = total - shown.length;
    text(this.more, rest > 0 ? `and ${number(rest)} more${quarantined}` : quarantined.slice(2));
  }

  item(index, request, model, chosen) {
    let item = this.list.children[index];
    if (!item) {
      item = element("li");
      const button = element("button");
      button.type = "button";
      button.append(element("span", "id"), element("span", "hint"));
      button.addEventListener("click", () => this.choose(Number(button.dataset.request)));
      item.append(button);
      this.list.append(item);
    }
    const [button] = item.children;
    const name = model.names.get(request);
    button.dataset.request = request;
    button.setAttribute("aria-pressed", String(request === chosen));
    text(button.children[0], model.idOf(request));
    const sinceMs = name ? model.frame.now_ms - name.submitted_ms : 0;
    const tenant = name?.tenant ? `${name.tenant} · ` : "";
    text(button.children[1], `${tenant}${number(name?.prompt ?? 0)} tokens · ${duration(sinceMs)}`);
  }
}

// Of those that no executor has; else of those that wait at one.
function whyNext(model) {
  const { frame } = model;
  const [first] = frame.waiting;
  const at = frame.executors.find((told) => told.reason);
  if (!first && !at) return "Nobody waits.";
  const next = first ?? at.swapped[0] ?? at.waiting[0];
  const reasons = first ? frame.reasons : [at.reason];
  const lacks = reasons.filter((reason) => reason.lack !== "turn");
  return `Next is ${model.idOf(next)}: ${(lacks.length ? lacks : reasons).map(why).join("; ")}.`;
}

export class RequestPanel {
  constructor(choose) {
    this.hint = document.getElementById("life-hint");
    this.body = document.getElementById("life-body");
    this.title = element("h3");
    this.facts = element("dl");
    this.progress = element("progress");
    this.progress.setAttribute("aria-label", "Tokens of the most that it may have");
    this.events = element("ol", "events");
    const clear = element("button", "", "Choose none");
    clear.type = "button";
    clear.addEventListener("click", () => choose(0));
    this.body.append(this.title, this.progress, this.facts, this.events, clear);
    this.written = 0;
  }

  write(model, chosen) {
    const life = model.lives.get(chosen);
    this.hint.hidden = Boolean(life);
    this.body.hidden = !life;
    if (!life) return;
    const { name } = life;
    text(this.title, name.id);
    const blocks = [...model.executors.values()].map((known) => [
      known.device.blocksOf(chosen),
      known.host.blocksOf(chosen),
    ]);
    const sum = (which) => blocks.reduce((total, pair) => total + pair[which], 0);
    const output = Math.max(0, life.tokens - (name.prompt ?? 0));
    this.progress.max = Math.max(1, name.stop_len || life.tokens);
    this.progress.value = life.tokens;
    const facts = {
      "Now": life.state ? `${life.state}${life.where ? ` (${life.where})` : ""}` : "over",
      ...(name.tenant ? { Tenant: name.tenant } : {}),
      "Prompt": `${number(name.prompt ?? 0)} tokens`,
      "Output": `${number(output)} tokens`,
      "Computed": `${number(life.computed)} tokens`,
      "Blocks": `${sum(0)} on devices, ${sum(1)} on hosts`,
      "Steps": `${number(life.steps)} since this page looks`,
    };
    const wanted = Object.entries(facts);
    while (this.facts.children.length > wanted.length) this.facts.lastChild.remove();
    wanted.forEach(([term, value], index) => {
      let pair = this.facts.children[index];
      if (!pair) {
        pair = element("div");
        pair.append(element("dt"), element("dd"));
        this.facts.append(pair);
      }
      text(pair.children[0], term);
      text(pair.children[1], value);
    });
    this.writeEvents(life);
  }

  // What the scheduler wrote down; where it did not, what was seen here.
  writeEvents(life) {
    const begin = life.name.submitted_ms ?? life.events[0]?.atMs ?? 0;
    const events = life.told
      ? life.told.events.map((event) => [1_000 * event.at_s, describeEvent(event)])
      : life.events.map(({ atMs, what }) => [Math.max(0, atMs - begin), what]);
    const all = events.slice(-20);
    while (this.events.children.length > all.length) this.events.lastChild.remove();
    all.forEach(([sinceMs, what], index) => {
      let item = this.events.children[index];
      if (!item) {
        item = element("li");
        item.append(element("time"), element("span"));
        this.events.append(item);
      }
      text(item.children[0], `+${duration(sinceMs)}`);
      text(item.children[1], what);
    });
  }
}

function describeEvent({ kind, executor, reason, numbers }) {
  const words = (name) => name.replaceAll("_", " ");
  const where = executor ? ` at ${executor}` : "";
  const details = Object.entries(numbers)
    .filter(([, value]) => value)
    .map(([name, value]) => `${number(value)} ${words(name.replace(/^num_/, ""))}`);
  const rest = [...(reason ? [words(reason)] : []), ...details];
  return words(kind) + where + (rest.length ? `: ${rest.join(", ")}` : "");
}
