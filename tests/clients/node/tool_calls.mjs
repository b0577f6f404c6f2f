// Tools of chats: called, streamed, answered, and run by the package's own loop.

import { standardFunction } from "openai/helpers/standard-schema";
import { NAMED, PLACE_SCHEMA, TERSE, TOOL, USER, WEATHER } from "./questions.mjs";

const called = ({ choices: [{ message, finish_reason }] }) => [
  message.tool_calls.map((call) => [
    call.type,
    call.function.name,
    JSON.parse(call.function.arguments),
  ]),
  finish_reason,
];

export const toolCalls = (client, model) => {
  const { completions } = client.chat;
  const asked = { model, messages: [USER], tools: [TOOL], max_completion_tokens: 150, ...TERSE };
  const required = { ...asked, tool_choice: "required" };
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

  return {
    tool_required: async () => called(await completions.create(required)),
    tool_named: async () => called(await completions.create({ ...asked, tool_choice: NAMED })),
    // What the model would write by itself, if it were larger.
    tool_auto: async () => {
      const written = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>';
      return called(await completions.create({ ...asked, guided_choice: [written] }));
    },
    tool_auto_but_text: async () => {
      const answer = await completions.create({ ...asked, max_completion_tokens: 6 });
      return [answer.choices[0].message.content, answer.choices[0].message.tool_calls ?? null];
    },
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
      const final = await stream.finalChatCompletion();
      return [called(final), deltas === done.arguments, done.name];
    },
    tool_answered: async () => {
      const { message } = (await completions.create(required)).choices[0];
      const results = message.tool_calls.map(({ id }) => ({
        role: "tool",
        tool_call_id: id,
        content: "rain",
      }));
      const messages = [USER, message, ...results];
      const answer = await completions.create({ ...asked, messages, max_completion_tokens: 6 });
      return [answer.choices[0].message.role, answer.choices[0].message.content !== ""];
    },
    run_tools_once: async () => {
      const cities = [];
      const runner = completions.runTools({
        ...asked,
        tools: [runnable(cities)],
        tool_choice: NAMED,
      });
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
      const tools = [runnable(cities)];
      const runner = completions.runTools(
        { ...required, tools, stream: true },
        { maxChatCompletions: 2 },
      );
      const calls = [];
      runner.on("functionToolCall", ({ name }) => calls.push(name));
      await runner.done();
      return [calls, cities];
    },
    run_tools_until_text: async () => {
      const runner = completions.runTools({ ...asked, tools: [runnable([])], stop: [","] });
      return runner.finalContent();
    },
  };
};
