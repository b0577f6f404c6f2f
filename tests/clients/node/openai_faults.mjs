// What the official Node package makes of a server that is full or slow: run, one call at a time,
// by `test_openai_node_faults.py`.
//
// `node openai_faults.mjs BASE_URL MODEL CALL`. Prints lines of JSON, the last of which is what came.
// The package's timers are ours: it says `{"waits": ms}`, and a line of the input lets the time pass.

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

/** Lets the time of those timers that `isOurs` pass when it is told. */
const holdTimers = (isOurs) => {
  const { setTimeout } = globalThis;
  globalThis.setTimeout = (callback, ms, ...args) => {
    if (!isOurs(ms)) return setTimeout(callback, ms, ...args);
    say({ waits: ms });
    told().then(() => callback(...args));
    return undefined;
  };
};

const TIMEOUT_MS = 4321;

const calls = {
  full: () => failure(chat(client({ maxRetries: 0 }))),

  retried: async () => {
    const timeout = 10 * TIMEOUT_MS;
    holdTimers((ms) => ms !== timeout);
    const answer = await chat(client({ maxRetries: 1, timeout }), { max_tokens: 3 });
    return answer.choices[0].finish_reason;
  },

  timeout: () => {
    holdTimers((ms) => ms === TIMEOUT_MS);
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
      if (choices[0].delta.content === undefined) continue;
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
