// The page: draws each frame of the feed.

import { element, sign, text } from "./elements.js";
import { ExecutorCard } from "./executor_card.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { Model } from "./model.js";
import { Queue, RequestPanel, Requests } from "./request_panel.js";
import { BLOCK_MEANINGS, MOVE_MEANING, ROW_MEANINGS, duration, number, share } from "./words.js";

// Text is updated no faster than people can read it.
const TEXT_MS = 500;
const LIFE_MS = 1_000;
// Frames come several times a second.
const SILENT_MS = 5_000;
const KEY = "splitserve-live-key";

const get = (id) => document.getElementById(id);
const model = new Model();
const cards = new Map();
let chosen = 0;
let isPaused = false;
let isDirty = false;
let writtenAt = -TEXT_MS;
let framedAt = 0;
let isSilent = false;
let colours = readColours();

const queue = new Queue(choose);
const requests = new Requests(choose);
const panel = new RequestPanel(choose);
const history = new History(get("history"));
const feed = new Feed({
  frame(frame, isFirst) {
    if (isFirst) model.begin();
    if (isFirst || isSilent) connected();
    framedAt = performance.now();
    model.take(frame);
    if (!isDirty) {
      isDirty = true;
      requestAnimationFrame(draw);
    }
  },
  lost(message) {
    pill("lost", "connection lost");
    markOld(`No connection: ${message}.`, "The page keeps retrying.");
  },
  refused(message, status) {
    framedAt = 0;
    pill("lost", status === 401 ? "key needed" : "not allowed");
    get("key-form").hidden = false;
    text(get("key-problem"), feed.key ? message : "Only operators may watch this scheduler.");
    get("key").focus();
  },
});

function connected() {
  isSilent = false;
  pill("serving", "live");
  problem("");
  document.body.classList.remove("stale");
  const form = get("key-form");
  if (form.contains(document.activeElement)) get("main").focus();
  form.hidden = true;
  writtenAt = -TEXT_MS;
}

// Marks the picture as old. The text is set once, not at each retry, as screen readers read it out.
function markOld(what, outlook) {
  framedAt = 0;
  isSilent = false;
  const at = model.frame ? `The picture is of ${clock(model.frame.unix_ms)}. ` : "";
  problem(`${what} ${at}${outlook}`);
  document.body.classList.add("stale");
}

// Detects a connection without frames.
function checkSilence() {
  if (!framedAt || performance.now() - framedAt < SILENT_MS) return;
  pill("late", "silent");
  markOld("The scheduler sends nothing.", "The page continues when it does.");
  isSilent = true;
}

const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

function pill(state, words) {
  get("connection").dataset.state = state;
  text(get("connection"), words);
}

function problem(message) {
  get("problem").hidden = !message;
  text(get("problem"), message);
}

// Once a second for the selected request, until it has ended.
async function askForLife() {
  const life = model.lives.get(chosen);
  if (!life || document.hidden || (life.recorded && !life.recorded.is_unfinished)) return;
  const recorded = await feed.life(life.name).catch(() => null);
  if (recorded) life.recorded = recorded;
}

function say(words) {
  text(get("spoken"), words);
}

function choose(request) {
  chosen = request === chosen ? 0 : request;
  if (chosen) {
    model.life(chosen);
    say(`request ${model.idOf(chosen)} is selected`);
    askForLife();
  } else {
    say("no request is selected");
  }
  writtenAt = -TEXT_MS;
  draw();
}

function draw() {
  isDirty = false;
  if (!model.frame) return;
  const now = performance.now();
  const isToWrite = now - writtenAt >= TEXT_MS;
  const nameOf = (request) => model.idOf(request);
  const shown = model.lives.get(chosen)?.state ? chosen : 0;
  for (const [address, known] of model.executors) {
    let card = cards.get(address);
    if (!card) {
      card = new ExecutorCard(address, choose, say);
      cards.set(address, card);
      get("executors").append(card.root);
    }
    card.draw(known, shown, colours, nameOf);
    if (isToWrite) card.write(known, nameOf);
  }
  if (!isToWrite) return;
  writtenAt = now;
  for (const [address, card] of cards) {
    if (model.executors.has(address)) continue;
    if (model.gone.has(address)) {
      card.lose(model.frame.now_ms - model.gone.get(address));
    } else {
      card.root.remove();
      cards.delete(address);
    }
  }
  const hasNoExecutor = model.executors.size === 0;
  get("no-executor").hidden = !hasNoExecutor;
  text(
    get("no-executor"),
    hasNoExecutor
      ? "No executor is serving. Requests wait for one, or are refused if none has ever registered. " +
          "“splitserve executor” starts one."
      : "",
  );
  history.show(model.history, colours);
  queue.write(model, chosen);
  requests.write(model, chosen);
  panel.write(model, chosen);
  writeTotals();
}

function writeTotals() {
  const executors = [...model.executors.values()].map((known) => known.latest);
  const sum = (value) => executors.reduce((total, each) => total + value(each), 0);
  const blocks = [...model.executors.values()].map((known) => known.device);
  const numBlocks = blocks.reduce((total, pool) => total + pool.states.length, 0);
  const numFree = blocks.reduce((total, pool) => total + pool.counts[0] + pool.counts[3], 0);
  const { ttft } = model.frame;
  const totals = {
    Executors: number(executors.length),
    Running: number(sum((each) => new Set(each.running).size)),
    Waiting: number(model.frame.num_waiting + sum((each) => each.num_waiting)),
    Swapped: number(sum((each) => each.swapped.length)),
    "Tokens/s": number(Math.round(model.tokensPerSecond)),
    "TTFT p50": ttft ? duration(ttft.p50_us / 1000) : "–",
    "TTFT p99": ttft ? duration(ttft.p99_us / 1000) : "–",
    "KV in use": numBlocks ? share(numBlocks - numFree, numBlocks) : "–",
  };
  const list = get("totals");
  Object.entries(totals).forEach(([term, value], index) => {
    let pair = list.children[index];
    if (!pair) {
      pair = element("div");
      pair.append(element("dt", "", term), element("dd"));
      list.append(pair);
    }
    text(pair.children[1], value);
  });
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    states: [0, 1, 2, 3, 4, 5].map((state) => read(`--block-${state}`)),
    kinds: [0, 1, 2, 3, 4].map((kind) => read(`--row-${kind}`)),
    page: read("--card"),
    text: read("--text"),
    line: read("--line"),
    chart: [read("--block-1"), read("--block-5")],
  };
}

function legend() {
  const add = (list, className, words) => {
    const item = element("li");
    const made = sign(className);
    text(made.lastChild, words);
    item.append(made);
    get(list).append(item);
  };
  BLOCK_MEANINGS.forEach((words, state) => add("block-legend", `block block-${state}`, words));
  ROW_MEANINGS.forEach((words, kind) => words && add("row-legend", `row row-${kind}`, words));
  add("row-legend", "row moves", MOVE_MEANING);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = readColours();
  for (const card of cards.values()) for (const map of [card.device, card.host]) map.length = -1;
  draw();
});

get("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  text(get("pause"), isPaused ? "Resume" : "Pause");
  if (isPaused) {
    // No frames arrive while paused, so selections refer to the picture.
    stop();
    problem("");
    writtenAt = -TEXT_MS;
    draw();
    pill("paused", model.frame ? `paused at ${clock(model.frame.unix_ms)}` : "paused");
  } else {
    pill("", "connecting");
    feed.restart();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chosen) choose(0);
});

get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.key = get("key").value.trim();
  sessionStorage.setItem(KEY, feed.key);
  get("key").value = "";
  if (isPaused) get("pause").click();
  start();
});

get("scheduler").addEventListener("change", () => {
  feed.scheduler = get("scheduler").value;
  for (const card of cards.values()) card.root.remove();
  cards.clear();
  model.gone.clear();
  model.lives.clear();
  chosen = 0;
  if (isPaused) get("pause").click();
  else feed.restart();
});

document.addEventListener("visibilitychange", () => {
  // A hidden page requests no frames.
  if (document.hidden) stop();
  else if (!isPaused) feed.restart();
});

function stop() {
  feed.stop();
  framedAt = 0;
}

async function start() {
  feed.restart();
  const addresses = await feed.schedulers().catch(() => []);
  const select = get("scheduler");
  select.replaceChildren(...addresses.map((address) => new Option(address)));
  select.parentElement.hidden = addresses.length < 2;
}

feed.key = sessionStorage.getItem(KEY) ?? "";
legend();
start();
setInterval(askForLife, LIFE_MS);
setInterval(checkSilence, LIFE_MS);
