// Requests that are refused, and what the package throws.

import OpenAI from "openai";
import { USER } from "./questions.mjs";

const refusal = (promise) =>
  promise.then(
    () => "answered",
    (error) => [error.constructor.name, error.status ?? null, error.param ?? null, error.code ?? null],
  );

export const refusedCalls = (client, model) => {
  const chat = (fields) =>
    refusal(client.chat.completions.create({ model, messages: [USER], ...fields }));
  const completion = (fields) =>
    refusal(client.completions.create({ model, prompt: new Array(2100).fill(5), ...fields }));

  return {
    unknown_model: () => chat({ model: "nobody" }),
    unknown_model_streamed: () => chat({ model: "nobody", stream: true }),
    unknown_model_retrieved: () => refusal(client.models.retrieve("nobody")),
    unknown_path: () => refusal(client.embeddings.create({ model, input: "a" })),
    bad_value: () => chat({ temperature: -1 }),
    bad_type: () => chat({ max_tokens: "many" }),
    bad_field_within: () => chat({ messages: [{ ...USER, colour: "red" }] }),
    unknown_field: () => chat({ no_such_field: 1 }),
    tool_without_tools: () => chat({ tool_choice: "required" }),
    bad_schema: () =>
      chat({
        response_format: {
          type: "json_schema",
          json_schema: { name: "bad", schema: { type: "no such type" } },
        },
      }),
    long_prompt: () => completion({}),
    long_prompt_streamed: () => completion({ stream: true }),
    kept_response: () =>
      refusal(client.responses.create({ model, input: "Hello!", previous_response_id: "resp_1" })),
    helper_refused: () =>
      refusal(
        client.chat.completions.stream({ model, messages: [USER], top_p: 2 }).finalContent(),
      ),
    nobody_there: () => {
      const baseURL = "http://127.0.0.1:9/v1";
      return refusal(
        new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).models.list(),
      );
    },
  };
};
