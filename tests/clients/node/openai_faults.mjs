// What the official Node package makes of a server that is full or slow: run, one call at a time,
// by `test_openai_node_faults.py`.
//
// `node openai_faults.mjs BASE_URL MODEL CALL`. Prints lines of JSON, the last of which is what came.
// A line of the input lets a call go on.

import { once } from "node:events";
import { createInterface } from "node:readline";
import OpenAI from "openai";

const [baseUrl, model, call] = process.argv.slice(2);
const input = createInterface({ input: process.stdin });
const say = (fact) => console.log(JSON.stringify(fact));
const told = () => once(input, "line");

const client = (options) => new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", ...options });
const messages = [{ role: "user", content: "fox" }];
const chat = (to, fields = {}, options = {}) =>
  to.chat.completions.create({ model, messages, max_tokens: 900, ...fields }, options);
const failure = (promise) =>
  promise.then(
    () => "answered",
    (error) => [error.constructor.name, error.status ?? null, error.type ?? null, error.code ?? null],
  );

const TIMEOUT_MS = 4321;

/** Lets the time of a timer of TIMEOUT_MS pass when it is told. */
const holdTimer = () => {
  const { setTimeout } = globalThis;
  globalThis.setTimeout = (callback, ms, ...args) => {
    if (ms !== TIMEOUT_MS) return setTimeout(callback, ms, ...args);
    told().then(() => callback(...args));
    return undefined;
  };
};

const calls = {
  full: () => failure(chat(client({ maxRetries: 0 }))),

  retried: async () => {
    const tries = [];
    const watched = async (...args) => {
      tries.push(performance.now());
      const response = await fetch(...args);
      if (response.status === 429) say({ retry_after: response.headers.get("retry-after") });
      return response;
    };
    const answer = await chat(client({ maxRetries: 1, fetch: watched }), { max_tokens: 3 });
    return [answer.choices[0].finish_reason, tries.length, tries.at(-1) - tries[0]];
  },

  timeout: () => {
    holdTimer();
    return failure(chat(client({ maxRetries: 0, timeout: TIMEOUT_MS })));
  },

  abort: async () => {
    const controller = new AbortController();
    const answer = failure(chat(client({ maxRetries: 0 }), {}, { signal: controller.signal }));
    await told();
    controller.abort();
    return answer;
  },

  abort_stream: async () => {
    const stream = await chat(client({ maxRetries: 0 }), { stream: true });
    for await (const { choices } of stream) {
      // What is already here still comes.
      if (choices[0].delta.content === undefined || stream.controller.signal.aborted) continue;
      say("began");
      await told();
      stream.controller.abort();
    }
    return "ended";
  },

  leave_stream: async () => {
    const stream = await chat(client({ maxRetries: 0 }), { stream: true });
    for await (const { choices } of stream) {
      if (choices[0].delta.content === undefined) continue;
      say("began");
      await told();
      break;
    }
    return "left";
  },

  abort_helper: async () => {
    const stream = client({ maxRetries: 0 }).chat.completions.stream({
      model,
      messages,
      max_tokens: 900,
    });
    stream.once("content", async () => {
      say("began");
      await told();
      stream.abort();
    });
    return failure(stream.finalContent());
  },
};

say({ came: await calls[call]() });
// So that it is the call, not the end of the process, that ends connections.
await told();
input.close();
