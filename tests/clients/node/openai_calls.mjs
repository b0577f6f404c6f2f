// What the official Node package gets from a gateway, as JSON: run by `test_openai_node.py`.
//
// `node openai_calls.mjs BASE_URL MODEL`. All calls are made at once: an answer that belongs to
// another call shows.

import OpenAI from "openai";
import { chatCalls } from "./chat_calls.mjs";
import { completionCalls } from "./completion_calls.mjs";
import { refusedCalls } from "./refused_calls.mjs";
import { responseCalls } from "./response_calls.mjs";
import { toolCalls } from "./tool_calls.mjs";

const [baseUrl, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });

const calls = {
  models: async () => (await client.models.list()).data.map((item) => item.id),
  model: async () => (await client.models.retrieve(model)).object,
  ...chatCalls(client, model),
  ...completionCalls(client, model),
  ...responseCalls(client, model),
  ...toolCalls(client, model),
  ...refusedCalls(client, model),
};

const outcome = (call) =>
  call().then(
    (came) => came ?? null,
    (error) => ({ failed: error.stack, error: error.error }),
  );

const outcomes = Object.entries(calls).map(async ([name, call]) => [name, await outcome(call)]);
console.log(JSON.stringify(Object.fromEntries(await Promise.all(outcomes))));
