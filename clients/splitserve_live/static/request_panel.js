// Queue, running and ended requests, and the history of the selected request.

import { element, fill, text } from "./elements.js";
import { counted, duration, number, why } from "./words.js";

const MAX_SHOWN = 8;
// Fewer on a phone, so that the executors stay near.
const MAX_SHOWN_ON_PHONES = 4;
const KEPT_FOR_ENDED = 2;
const MAX_REASONS = 4;
// Of a longer history the middle is left out.
const FIRST_EVENTS = 4;
const LATEST_EVENTS = 16;
const phone = matchMedia("(max-width: 480px)");

// List of requests: a button for each, with its id and facts.
class RequestList {
  constructor(name, choose) {
    this.choose = choose;
    this.list = document.getElementById(name);
    this.heading = document.getElementById(`${name}-heading`);
    // By request: a request keeps its button when the list changes.
    this.items = new Map();
  }

  // `requests`: their numbers. `factsOf(request)`: texts shown for each.
  write(requests, model, chosen, factsOf) {
    this.arrange(requests);
    for (const request of requests) {
      const [button] = this.items.get(request).children;
      const [id, hint] = button.children;
      const tenant = (model.names.get(request) ?? model.lives.get(request)?.name)?.tenant ?? "";
      button.setAttribute("aria-pressed", String(request === chosen));
      text(id, model.idOf(request));
      text(hint.firstChild, factsOf(request).join(" · ") + (tenant ? " · " : ""));
      text(hint.lastChild, tenant);
    }
  }

  // Updates the list. The focus stays at its request; if that is gone, it moves to the request that
  // took its place.
  arrange(shown) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const place = [...this.list.children].findIndex((item) => item.contains(focused));
    const wanted = new Set(shown);
    for (const [request, item] of this.items) {
      if (wanted.has(request)) continue;
      item.remove();
      this.items.delete(request);
    }
    shown.forEach((request, index) => {
      if (!this.items.has(request)) this.items.set(request, this.make(request));
      const item = this.items.get(request);
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index]);
    });
    if (!focused || document.activeElement === focused) return;
    const { children } = this.list;
    const successor = focused.isConnected ? focused : children[Math.min(place, children.length - 1)];
    (successor?.querySelector("button") ?? successor ?? this.heading).focus();
  }

  make(request) {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    const name = element("bdi", "id");
    const hint = element("span", "hint");
    hint.append(element("span"), element("bdi"));
    button.append(name, hint);
    button.addEventListener("click", () => this.choose(request));
    item.append(button);
    return item;
  }
}

export class Queue {
  constructor(choose) {
    this.list = new RequestList("queue", choose);
    this.why = document.getElementById("why");
    this.reasons = document.getElementById("reasons");
    this.more = document.getElementById("more");
    this.next = element("bdi");
    this.nextWords = element("span");
    this.why.append(this.nextWords, this.next);
  }

  write(model, chosen) {
    const { frame } = model;
    const places = new Map();
    for (const executor of frame.executors) {
      for (const request of executor.waiting) places.set(request, executor.address);
    }
    const numHere = frame.executors.reduce((sum, executor) => sum + executor.num_waiting, 0);
    const total = frame.num_waiting + numHere;
    this.writeWhy(model);
    const shown = [...frame.waiting, ...places.keys()].slice(0, mostShown());
    this.list.write(shown, model, chosen, (request) => {
      const name = model.names.get(request);
      const sinceMs = name ? frame.now_ms - name.submitted_ms : 0;
      const facts = [counted(name?.prompt ?? 0, "token"), duration(sinceMs)];
      return places.has(request) ? [...facts, `at ${places.get(request)}`] : facts;
    });
    const quarantined = frame.num_quarantined ? `, ${frame.num_quarantined} in quarantine` : "";
    const rest = total - shown.length;
    text(this.more, rest > 0 ? `and ${number(rest)} more${quarantined}` : quarantined.slice(2));
  }

  // Reasons of the first unassigned request, or else of the first request that waits at an executor.
  writeWhy(model) {
    const { frame } = model;
    const [first] = frame.waiting;
    const at = frame.executors.find((executor) => executor.reason);
    const isAny = first !== undefined || at !== undefined;
    const next = first ?? at?.swapped[0] ?? at?.waiting[0];
    text(this.nextWords, isAny ? "Next is " : "No request waits.");
    text(this.next, isAny ? model.idOf(next) : "");
    const reasons = first === undefined ? (at ? [at.reason] : []) : frame.reasons;
    const lines = grouped(reasons.filter((reason) => reason.lack !== "turn"));
    const all = lines.length || !isAny ? lines : grouped(reasons);
    const shown = all.slice(0, MAX_REASONS);
    if (all.length > shown.length) shown.push(`and ${all.length - shown.length} other reasons`);
    fill(this.reasons, shown, () => element("li"), text);
  }
}

// Running requests, and below them those that ended while the page was open.
export class Requests {
  constructor(choose) {
    this.list = new RequestList("requests", choose);
    this.hint = document.getElementById("requests-hint");
  }

  write(model, chosen) {
    const { frame } = model;
    const places = new Map();
    for (const executor of frame.executors) {
      for (const request of executor.running) places.set(request, executor.address);
    }
    // Oldest first: a request keeps its position until it ends.
    const running = [...places.keys()].sort((one, other) => one - other);
    const lives = [...model.lives.values()].filter((life) => life.endedMs && !life.state);
    lives.sort((one, other) => other.endedMs - one.endedMs);
    // Lines are reserved for those that ended last, however many run.
    const numRunning = mostShown() - Math.min(lives.length, KEPT_FOR_ENDED);
    const ended = lives.map((life) => life.number);
    const shown = [...running.slice(0, numRunning), ...ended].slice(0, mostShown());
    this.list.write(shown, model, chosen, (request) => {
      const life = model.lives.get(request);
      const tokens = counted(life?.tokens ?? 0, "token");
      if (places.has(request)) return [tokens, `runs on ${places.get(request)}`];
      return [tokens, `ended ${duration(frame.now_ms - life.endedMs)} ago`];
    });
    const rest = running.length - numRunning;
    const some = rest > 0 ? `and ${number(rest)} more running` : "";
    text(this.hint, shown.length ? some : "None has run since the page was opened.");
  }
}

const mostShown = () => (phone.matches ? MAX_SHOWN_ON_PHONES : MAX_SHOWN);

// Returns a sentence for each distinct reason, with the executors that have it.
function grouped(reasons) {
  const addresses = new Map();
  for (const reason of reasons) {
    const sentence = why(reason);
    if (!addresses.has(sentence)) addresses.set(sentence, []);
    if (reason.address) addresses.get(sentence).push(reason.address);
  }
  return [...addresses].map(([sentence, where]) => {
    if (!where.length) return sentence;
    return `${sentence} (${where.length > 2 ? `${where.length} executors` : where.join(", ")})`;
  });
}

export class RequestPanel {
  constructor(choose) {
    this.hint = document.getElementById("life-hint");
    this.body = document.getElementById("life-body");
    this.title = element("h3");
    this.title.dir = "auto";
    this.facts = element("dl");
    this.progress = element("progress");
    this.progress.setAttribute("aria-label", "Tokens, of the maximum");
    this.events = element("ol", "events");
    this.clear = document.getElementById("choose-none");
    this.clear.addEventListener("click", () => choose(0));
    this.body.append(this.title, this.progress, this.facts, this.events);
  }

  write(model, chosen) {
    const life = model.lives.get(chosen);
    this.hint.hidden = Boolean(life);
    this.body.hidden = !life;
    if (!life && document.activeElement === this.clear) document.getElementById("life-heading").focus();
    this.clear.hidden = !life;
    if (!life) return;
    const { name } = life;
    text(this.title, name.id);
    const blocks = [...model.executors.values()].map((known) => [
      known.device.blocksOf(chosen),
      known.host.blocksOf(chosen),
    ]);
    const sum = (which) => blocks.reduce((total, pair) => total + pair[which], 0);
    // Token counts are known for requests that have run.
    const isKnown = life.tokens > 0;
    const output = Math.max(0, life.tokens - (name.prompt ?? 0));
    const tokens = (count) => (isKnown ? counted(count, "token") : "not seen yet");
    this.progress.hidden = !isKnown;
    this.progress.max = Math.max(1, name.stop_len || life.tokens);
    this.progress.value = life.tokens;
    const facts = {
      "Now": life.state ? `${life.state}${life.where ? ` (${life.where})` : ""}` : "ended",
      ...(name.tenant ? { Tenant: name.tenant } : {}),
      "Prompt": counted(name.prompt ?? 0, "token"),
      "Output": tokens(output),
      "Computed": tokens(life.computed),
      "Blocks": `${sum(0)} on devices, ${sum(1)} on hosts`,
      "Steps": `${number(life.steps)} since the page was opened`,
    };
    const make = () => {
      const pair = element("div");
      pair.append(element("dt"), element("dd"));
      pair.lastChild.dir = "auto";
      return pair;
    };
    fill(this.facts, Object.entries(facts), make, (pair, [term, value]) => {
      text(pair.firstChild, term);
      text(pair.lastChild, value);
    });
    this.writeEvents(life);
  }

  // Shows the scheduler's history, or without one the events seen here.
  writeEvents(life) {
    const begin = life.name.submitted_ms ?? life.events[0]?.atMs ?? 0;
    const events = life.recorded
      ? life.recorded.events.map((event) => [1_000 * event.at_s, describeEvent(event)])
      : life.events.map(({ atMs, what }) => [Math.max(0, atMs - begin), what]);
    const make = () => {
      const item = element("li");
      item.append(element("time"), element("span"));
      return item;
    };
    fill(this.events, withoutMiddle(events), make, (item, [sinceMs, what]) => {
      text(item.firstChild, sinceMs ? `+${duration(sinceMs)}` : sinceMs === 0 ? "0" : "");
      text(item.lastChild, what);
    });
  }
}

// A line without a time stands for the events that are left out.
function withoutMiddle(events) {
  const leftOut = events.length - FIRST_EVENTS - LATEST_EVENTS;
  if (leftOut <= 0) return events;
  const line = [null, `… ${counted(leftOut, "event")} more …`];
  return [...events.slice(0, FIRST_EVENTS), line, ...events.slice(-LATEST_EVENTS)];
}

function describeEvent({ kind, executor, reason, numbers }) {
  const words = (name) => name.replaceAll("_", " ");
  const where = executor ? ` at ${executor}` : "";
  const details = Object.entries(numbers)
    .filter(([, value]) => value)
    .sort()
    .map(([name, value]) => `${number(value)} ${words(name.replace(/^num_/, ""))}`);
  const rest = [...(reason ? [words(reason)] : []), ...details];
  return words(kind) + where + (rest.length ? `: ${rest.join(", ")}` : "");
}
