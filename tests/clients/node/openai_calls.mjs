// Calls the gateway with the official Node package: `node openai_calls.mjs BASE_URL MODEL`.
//
// Prints the outcome of each call as JSON for test_openai_node.py. All calls are made at once, so
// an answer that belongs to another call shows.

import OpenAI from "openai";
import {
  standardFunction,
  standardResponseFormat,
  standardTextFormat,
} from "openai/helpers/standard-schema";

const [baseUrl, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
const { chat, responses } = client;
const { completions } = chat;

// A tool and a schema that allow one answer: the model is too small to choose.
const PLACE = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const PLACE_SCHEMA = {
  "~standard": {
    version: 1,
    vendor: "tests",
    validate: (value) =>
      value?.city === "Oslo"
        ? { value: { inCity: value.city } }
        : { issues: [{ message: "must be Oslo", path: ["city"] }] },
    jsonSchema: { input: () => PLACE },
  },
};
const WEATHER = { name: "get_weather", description: "The weather.", parameters: PLACE };

// The penalty prevents endless white space, which JSON allows.
const terse = { temperature: 0, frequency_penalty: 2 };
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const story = { model, messages, temperature: 0, max_completion_tokens: 6 };
const hello = { model, messages: [{ role: "user", content: "Hello!" }], temperature: 0 };
const response_format = standardResponseFormat(PLACE_SCHEMA, "place");
const place = { model, messages, max_completion_tokens: 80, response_format, ...terse };
const asked = {
  model,
  messages,
  tools: [{ type: "function", function: WEATHER }],
  max_completion_tokens: 150,
  ...terse,
};
const required = { ...asked, tool_choice: "required" };
const named = { ...asked, tool_choice: { type: "function", function: { name: WEATHER.name } } };
const response = { model, input: "The weather?", max_output_tokens: 150, ...terse };
const responseTool = { ...response, tools: [{ type: "function", strict: true, ...WEATHER }] };

const gather = async (items) => {
  const gathered = [];
  for await (const item of items) gathered.push(item);
  return gathered;
};
const runnable = (cities) => ({
  type: "function",
  function: {
    ...WEATHER,
    parse: JSON.parse,
    function: ({ city }) => {
      cities.push(city);
      return { sky: "rain" };
    },
  },
});

const chatCalls = {
  chat_streamed: async () => {
    const chunks = await gather(
      await completions.create({ ...story, stream: true, stream_options: { include_usage: true } }),
    );
    const last = chunks.pop();
    const choices = chunks.map((chunk) => chunk.choices[0]);
    return [
      choices.map(({ delta }) => delta.content ?? "").join(""),
      choices.flatMap(({ finish_reason }) => finish_reason ?? []),
      [last.choices, last.usage.total_tokens],
    ];
  },
  chat_choices_streamed: async () => {
    const fields = { ...story, temperature: 1.5, seed: 3, n: 3 };
    const texts = ["", "", ""];
    for await (const { choices } of await completions.create({ ...fields, stream: true }))
      for (const { index, delta } of choices) texts[index] += delta.content ?? "";
    const whole = (await completions.create(fields)).choices.map(({ message }) => message.content);
    return texts.map((text, index) => text === whole[index] && text !== "");
  },
  helper_events: async () => {
    const stream = completions.stream({ ...hello, stream_options: { include_usage: true } });
    const seen = { deltas: "", chunks: 0 };
    stream
      .on("chunk", () => (seen.chunks += 1))
      .on("content.delta", ({ delta }) => (seen.deltas += delta))
      .on("content.done", ({ content }) => (seen.done = content))
      .on("finalContent", (content) => (seen.final = content))
      .on("totalUsage", (usage) => (seen.tokens = usage.completion_tokens));
    await stream.done();
    return [seen.deltas, seen.done, seen.final, seen.tokens, seen.chunks > 1];
  },
  helper_iterated: async () => {
    const stream = completions.stream(hello);
    const deltas = (await gather(stream)).map(({ choices }) => choices[0].delta.content ?? "");
    const { choices } = await stream.finalChatCompletion();
    return [deltas.join(""), choices[0].message.content, choices[0].finish_reason];
  },
  structured: async () => (await completions.parse(place)).choices[0].message.parsed,
  structured_and_streamed: async () =>
    (await completions.stream(place).finalChatCompletion()).choices[0].message.parsed,
  structured_and_cut_off: () =>
    completions
      .parse({ ...place, max_completion_tokens: 2 })
      .catch((error) => error.constructor.name),
};

const responseCalls = {
  response_streamed: async () => {
    const stream = responses.stream({ model, input: "Hello!", temperature: 0 });
    let text = "";
    stream.on("response.output_text.delta", ({ delta }) => (text += delta));
    const { output_text, status } = await stream.finalResponse();
    return [text, output_text, status];
  },
  response_structured: async () => {
    const text = { format: standardTextFormat(PLACE_SCHEMA, "place") };
    return (await responses.parse({ ...response, text })).output_parsed;
  },
  response_named_tool: async () => {
    const tool_choice = { type: "function", name: WEATHER.name };
    const { output } = await responses.create({ ...responseTool, tool_choice });
    return output.map(({ type, name, arguments: given }) => [type, name, JSON.parse(given)]);
  },
  response_tool_streamed: async () => {
    const events = await gather(responses.stream({ ...responseTool, tool_choice: "required" }));
    const deltas = events
      .filter(({ type }) => type === "response.function_call_arguments.delta")
      .map(({ delta }) => delta);
    const done = events.find(({ type }) => type === "response.function_call_arguments.done");
    const { output } = events.at(-1).response;
    return [
      JSON.parse(done.arguments),
      deltas.join("") === done.arguments,
      output.map(({ name, arguments: given }) => [name, given === done.arguments]),
    ];
  },
};

const toolCalls = {
  tool_parsed: async () => {
    const tool = standardFunction({ name: WEATHER.name, parameters: PLACE_SCHEMA });
    const { choices } = await completions.parse({ ...required, tools: [tool] });
    return choices[0].message.tool_calls.map((call) => call.function.parsed_arguments);
  },
  tool_streamed: async () => {
    const stream = completions.stream(required);
    let deltas = "";
    let done;
    stream
      .on("tool_calls.function.arguments.delta", (event) => (deltas += event.arguments_delta))
      .on("tool_calls.function.arguments.done", (event) => (done = event));
    const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
    const [call] = message.tool_calls;
    return [done.name, JSON.parse(deltas), call.function.arguments === deltas, finish_reason];
  },
  run_tools_once: async () => {
    const cities = [];
    const runner = completions.runTools({ ...named, tools: [runnable(cities)] });
    return [await runner.finalFunctionToolCallResult(), cities];
  },
  run_tools_twice: async () => {
    const cities = [];
    const tools = [runnable(cities)];
    const runner = completions.runTools({ ...required, tools }, { maxChatCompletions: 2 });
    await runner.done();
    return [runner.messages.map(({ role }) => role), cities];
  },
  run_tools_streamed: async () => {
    const cities = [];
    const runner = completions.runTools(
      { ...required, tools: [runnable(cities)], stream: true },
      { maxChatCompletions: 2 },
    );
    const calls = [];
    runner.on("functionToolCall", ({ name }) => calls.push(name));
    await runner.done();
    return [calls, cities];
  },
  run_tools_until_text: () =>
    completions.runTools({ ...asked, tools: [runnable([])], stop: [","] }).finalContent(),
};

const refusal = (promise) =>
  promise.then(
    () => "answered",
    (error) => [error.constructor.name, error.status ?? null, error.param ?? null, error.code ?? null],
  );
const refused = (fields) => refusal(completions.create({ ...story, ...fields }));
const badSchema = { name: "bad", schema: { type: "no such type" } };
const nobody = new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "none", maxRetries: 0 });

const refusedCalls = {
  unknown_model_streamed: () => refused({ model: "nobody", stream: true }),
  unknown_model_retrieved: () => refusal(client.models.retrieve("nobody")),
  unknown_path: () => refusal(client.images.generate({ model, prompt: "a" })),
  bad_field_within: () => refused({ messages: [{ ...messages[0], colour: "red" }] }),
  bad_schema: () => refused({ response_format: { type: "json_schema", json_schema: badSchema } }),
  kept_response: () =>
    refusal(responses.create({ model, input: "Hello!", previous_response_id: "resp_1" })),
  helper_refused: () => refusal(completions.stream({ ...story, top_p: 2 }).finalContent()),
  nobody_there: () => refusal(nobody.models.list()),
};

const calls = {
  models: async () => (await gather(client.models.list())).map((item) => item.id),
  model: async () => (await client.models.retrieve(model)).object,
  ...chatCalls,
  ...responseCalls,
  ...toolCalls,
  ...refusedCalls,
};
const outcome = (call) =>
  call().then(
    (came) => came ?? null,
    (error) => ({ failed: error.stack, error: error.error }),
  );
const outcomes = Object.entries(calls).map(async ([name, call]) => [name, await outcome(call)]);
console.log(JSON.stringify(Object.fromEntries(await Promise.all(outcomes))));
