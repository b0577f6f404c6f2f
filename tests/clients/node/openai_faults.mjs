// Calls a full or slow gateway with the official Node package, and leaves calls early.
//
// `node openai_faults.mjs BASE_URL MODEL CALL`, run by test_openai_node_faults.py. Prints lines of
// JSON, the last of which is the outcome. A line of input lets a call continue.

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

const calls = {
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

  abort: async () => {
    const controller = new AbortController();
    const answer = failure(chat(client({ maxRetries: 0 }), {}, { signal: controller.signal }));
    await told();
    controller.abort();
    return answer;
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
