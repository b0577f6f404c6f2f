// What the official Node package gets from a gateway, as JSON: run by `test_openai_node.py`.
// `node openai_calls.mjs BASE_URL MODEL`

import OpenAI from "openai";

const [baseUrl, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });

const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const hello = [{ role: "user", content: "Hello!" }];
const greedy = { model, temperature: 0 };
// Against white space without end, which JSON allows and the model likes.
const terse = { ...greedy, frequency_penalty: 2, max_tokens: 150 };

const city = {
  type: "object",
  properties: { city: { enum: ["Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "The weather of a city.", parameters: city };
const tools = [{ type: "function", function: weather }];
const responseTools = [{ type: "function", strict: true, ...weather }];
const called = (call) => [call.name, JSON.parse(call.arguments)];

/** The class, status and details of what `call` throws. */
async function failure(call) {
  try {
    await call();
    return "no error";
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.param ?? null, error.code ?? null];
  }
}

const calls = {
  async models() {
    const names = [];
    for await (const item of client.models.list()) names.push(item.id);
    return names;
  },
  async chat() {
    const answer = await client.chat.completions.create({ ...greedy, messages, max_tokens: 6 });
    const [{ message, finish_reason }] = answer.choices;
    return [message.role, message.content, finish_reason, answer.usage.total_tokens];
  },
  async chatStream() {
    const stream = await client.chat.completions.create({
      ...greedy,
      messages,
      max_tokens: 6,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return [text, usage.total_tokens];
  },
  async chatStreamHelper() {
    const stream = client.chat.completions.stream({ ...greedy, messages: hello });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    return [text, final.choices[0].message.content, final.choices[0].finish_reason];
  },
  async chatLogprobs() {
    const answer = await client.chat.completions.create({
      ...greedy,
      messages,
      max_tokens: 3,
      logprobs: true,
      top_logprobs: 2,
    });
    return answer.choices[0].logprobs.content.map((item) => [item.token, item.top_logprobs.length]);
  },
  async completion() {
    const answer = await client.completions.create({
      ...greedy,
      prompt: ["Once upon a time", "The fox"],
      max_tokens: 6,
    });
    return answer.choices.map((choice) => choice.text);
  },
  async completionStream() {
    const stream = await client.completions.create({
      ...greedy,
      prompt: "Once upon a time",
      max_tokens: 6,
      stream: true,
    });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0].text;
    return text;
  },
  async structured() {
    const answer = await client.chat.completions.parse({
      ...terse,
      messages,
      response_format: {
        type: "json_schema",
        json_schema: { name: "answer", schema: city, strict: true },
      },
    });
    return JSON.parse(answer.choices[0].message.content);
  },
  async tools() {
    const answer = await client.chat.completions.create({
      ...terse,
      messages,
      tools,
      tool_choice: "required",
    });
    return answer.choices[0].message.tool_calls.map((call) => called(call.function));
  },
  async toolsStreamed() {
    const stream = client.chat.completions.stream({
      ...terse,
      messages,
      tools,
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    const final = await stream.finalChatCompletion();
    return final.choices[0].message.tool_calls.map((call) => called(call.function));
  },
  async toolsRun() {
    // The package calls the function, sends back what it says, and asks again.
    const runner = client.chat.completions.runTools(
      {
        ...terse,
        messages,
        tools: [
          {
            type: "function",
            function: { ...weather, parse: JSON.parse, function: ({ city }) => `rain in ${city}` },
          },
        ],
        tool_choice: "required",
      },
      { maxChatCompletions: 1 },
    );
    await runner.done();
    return runner.messages.filter((item) => item.role === "tool").map((item) => item.content);
  },
  async response() {
    const answer = await client.responses.create({ ...greedy, input: "Hello!" });
    return [answer.output_text, answer.status];
  },
  async responseStream() {
    const stream = client.responses.stream({ ...greedy, input: "Hello!" });
    let text = "";
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return [text, (await stream.finalResponse()).output_text];
  },
  async responseTools() {
    const answer = await client.responses.create({
      ...greedy,
      frequency_penalty: 2,
      max_output_tokens: 150,
      input: "The weather?",
      tools: responseTools,
      tool_choice: "required",
    });
    return answer.output.map(called);
  },
  async streamLeft() {
    const stream = await client.chat.completions.create({
      ...greedy,
      messages,
      max_tokens: 1900,
      ignore_eos: true,
      stream: true,
    });
    for await (const chunk of stream) return chunk.choices[0].delta.role;
  },
  unknownModel: () =>
    failure(() => client.chat.completions.create({ model: "nobody", messages })),
  badField: () =>
    failure(() => client.chat.completions.create({ ...greedy, messages, temperature: -1 })),
  tooLong: () =>
    failure(() => client.completions.create({ ...greedy, prompt: Array(2100).fill(5) })),
  nobodyThere: () =>
    failure(() =>
      new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "none", maxRetries: 0 }).models.list(),
    ),
};

const came = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    came[name] = await call();
  } catch (error) {
    came[name] = { failed: error.stack };
  }
}
process.stdout.write(JSON.stringify(came));
