// The page: frames come in, the picture follows them.

import { ExecutorCard, element, text } from "./executor_card.js";
import { Feed } from "./feed.js";
import { Model } from "./model.js";
import { Queue, RequestPanel } from "./request_panel.js";
import { BLOCK_MEANINGS, ROW_MEANINGS, number } from "./words.js";

// Text changes no faster than people read it.
const TEXT_MS = 500;
const LIFE_MS = 1_000;
const KEY = "splitserve-live-key";

const get = (id) => document.getElementById(id);
const model = new Model();
const cards = new Map();
let chosen = 0;
let isPaused = false;
let isDirty = false;
let writtenAt = 0;
let colours = readColours();

const queue = new Queue(choose);
const panel = new RequestPanel(choose);
const feed = new Feed({
  frame(frame, isFirst) {
    if (isFirst) {
      model.begin();
      connected();
    }
    model.take(frame);
    if (!isDirty) {
      isDirty = true;
      requestAnimationFrame(draw);
    }
  },
  lost(message, pauseMs) {
    pill("lost", "connection lost");
    problem(`No connection: ${message}. What you see is old; trying again in ${pauseMs / 1000} s.`);
    document.body.classList.add("stale");
  },
  refused(message, status) {
    pill("lost", status === 401 ? "key needed" : "not allowed");
    get("key-form").hidden = false;
    text(get("key-problem"), feed.key ? message : "This scheduler shows itself to operators only.");
    get("key").focus();
  },
});

function connected() {
  pill("serving", isPaused ? "paused" : "live");
  problem("");
  get("key-form").hidden = true;
  document.body.classList.remove("stale");
  writtenAt = 0;
}

function pill(state, words) {
  get("connection").dataset.state = state;
  text(get("connection"), words);
}

function problem(message) {
  get("problem").hidden = !message;
  text(get("problem"), message);
}

// Once a second, of the request that is chosen, until it is over.
async function askForLife() {
  const life = model.lives.get(chosen);
  if (!life || document.hidden || (life.told && !life.told.is_unfinished)) return;
  const told = await feed.life(life.name).catch(() => null);
  if (told) life.told = told;
}

function say(words) {
  text(get("spoken"), words);
}

function choose(request) {
  chosen = request === chosen ? 0 : request;
  if (chosen) {
    model.life(chosen);
    say(`request ${model.idOf(chosen)} is chosen`);
    askForLife();
  }
  writtenAt = 0;
  draw();
}

function draw() {
  isDirty = false;
  if (!model.frame || (isPaused && writtenAt)) return;
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
    if (isToWrite) card.write(known);
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
  const isNobody = model.executors.size === 0;
  get("nobody").hidden = !isNobody;
  text(
    get("nobody"),
    isNobody ? "No executor serves. Requests wait for one; splitserve executor starts one." : "",
  );
  queue.write(model, chosen);
  panel.write(model, chosen);
  writeTotals();
}

function writeTotals() {
  const told = [...model.executors.values()].map((known) => known.told);
  const sum = (value) => told.reduce((total, each) => total + value(each), 0);
  const blocks = [...model.executors.values()].map((known) => known.device);
  const numBlocks = blocks.reduce((total, pool) => total + pool.states.length, 0);
  const numFree = blocks.reduce((total, pool) => total + pool.counts[0] + pool.counts[3], 0);
  const totals = {
    Executors: number(told.length),
    Running: number(sum((each) => new Set(each.running).size)),
    Waiting: number(model.frame.num_waiting + sum((each) => each.num_waiting)),
    Swapped: number(sum((each) => each.swapped.length)),
    "Tokens/s": number(Math.round(model.tokensPerSecond)),
    "KV in use": numBlocks ? `${Math.round((100 * (numBlocks - numFree)) / numBlocks)} %` : "–",
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
  };
}

function legend() {
  const list = get("legend");
  const add = (className, words) => {
    const item = element("li");
    item.append(element("i", className), element("span", "", words));
    list.append(item);
  };
  BLOCK_MEANINGS.forEach((words, state) => add(`block block-${state}`, words));
  ROW_MEANINGS.forEach((words, kind) => words && add(`row row-${kind}`, `step: ${words}`));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = readColours();
  for (const card of cards.values()) for (const map of [card.device, card.host]) map.length = -1;
  draw();
});

get("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  get("pause").setAttribute("aria-pressed", String(isPaused));
  text(get("pause"), isPaused ? "Go on" : "Pause");
  pill("serving", isPaused ? "paused" : "live");
  draw();
});

get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.key = get("key").value.trim();
  sessionStorage.setItem(KEY, feed.key);
  get("key").value = "";
  start();
});

get("scheduler").addEventListener("change", () => {
  feed.scheduler = get("scheduler").value;
  for (const card of cards.values()) card.root.remove();
  cards.clear();
  model.gone.clear();
  model.lives.clear();
  chosen = 0;
  feed.restart();
});

document.addEventListener("visibilitychange", () => {
  // Who does not look costs nothing.
  if (document.hidden) feed.abort?.abort();
  else feed.restart();
});

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
