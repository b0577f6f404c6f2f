// Responses.

import { standardTextFormat } from "openai/helpers/standard-schema";
import {
  gather,
  HELLO,
  PLACE_SCHEMA,
  RESPONSES_TOOL,
  TERSE,
  TEXT_FORMAT,
  USER,
  WEATHER,
} from "./questions.mjs";

export const responseCalls = (client, model) => {
  const { responses } = client;
  const hello = { model, input: "Hello!", temperature: 0 };
  const terse = { model, input: "The weather?", ...TERSE, max_output_tokens: 150 };
  const forced = { ...terse, tools: [RESPONSES_TOOL], tool_choice: "required" };

  return {
    response: async () => {
      const { object, status, output_text, usage } = await responses.create(hello);
      const counted = usage.input_tokens + usage.output_tokens === usage.total_tokens;
      return [object, status, output_text, usage.output_tokens, counted];
    },
    response_cut_off: async () => {
      const answer = await responses.create({ ...hello, max_output_tokens: 16, input: [USER] });
      return [answer.status, answer.incomplete_details, answer.usage.output_tokens];
    },
    response_streamed: async () => {
      const events = await gather(await responses.create({ ...hello, stream: true }));
      const deltas = events.filter(({ type }) => type === "response.output_text.delta");
      return [
        [events[0].type, events.at(-1).type],
        deltas.map(({ delta }) => delta).join(""),
        events.every(({ sequence_number }, index) => sequence_number === index),
      ];
    },
    response_by_helper: async () => {
      const stream = responses.stream(hello);
      let text = "";
      stream.on("response.output_text.delta", ({ delta }) => (text += delta));
      const { output_text, status } = await stream.finalResponse();
      return [text, output_text, status];
    },
    response_goes_on_with_items: async () => {
      const first = await responses.create({ ...hello, instructions: "You tell stories." });
      const input = [HELLO, ...first.output, USER];
      const second = await responses.create({ ...hello, input, max_output_tokens: 16 });
      return [second.usage.input_tokens > first.usage.total_tokens, second.output_text !== ""];
    },
    response_structured: async () =>
      JSON.parse((await responses.create({ ...terse, text: { format: TEXT_FORMAT } })).output_text),
    response_structured_by_helper: async () => {
      const text = { format: standardTextFormat(PLACE_SCHEMA, "place") };
      return (await responses.parse({ ...terse, text })).output_parsed;
    },
    response_tool: async () => {
      const { output } = await responses.create(forced);
      return output.map(({ type, name, arguments: given }) => [type, name, JSON.parse(given)]);
    },
    response_named_tool: async () => {
      const tool_choice = { type: "function", name: WEATHER.name };
      const { output } = await responses.create({ ...forced, tool_choice });
      return output.map(({ type, name, arguments: given }) => [type, name, JSON.parse(given)]);
    },
    response_tool_streamed: async () => {
      const events = await gather(responses.stream(forced));
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
    response_tool_answered: async () => {
      const { output } = await responses.create(forced);
      const results = output.map(({ call_id }) => ({
        type: "function_call_output",
        call_id,
        output: "rain",
      }));
      const answer = await responses.create({
        ...terse,
        input: [{ role: "user", content: "The weather?" }, ...output, ...results],
        tools: [RESPONSES_TOOL],
        max_output_tokens: 16,
      });
      return [answer.output[0].type, answer.output_text !== ""];
    },
  };
};
