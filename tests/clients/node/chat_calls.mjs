// Chats: whole, streamed, by the streaming helper, and with structured output.

import { standardResponseFormat } from "openai/helpers/standard-schema";
import { gather, HELLO, PLACE_SCHEMA, RESPONSE_FORMAT, TERSE, USER } from "./questions.mjs";

export const chatCalls = (client, model) => {
  const { completions } = client.chat;
  const story = { model, messages: [USER], temperature: 0, max_completion_tokens: 6 };
  const create = (fields) => completions.create({ ...story, ...fields });
  const hello = { model, messages: [HELLO], temperature: 0 };
  const place = { model, messages: [USER], max_completion_tokens: 80, ...TERSE };

  return {
    chat: async () => {
      const answer = await create({});
      const [{ message, finish_reason, index }] = answer.choices;
      const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
      return [
        [answer.object, answer.model === model, index, message.role, message.content],
        [finish_reason, prompt_tokens, completion_tokens, total_tokens],
      ];
    },
    chat_streamed: async () => {
      const chunks = await gather(
        await create({ stream: true, stream_options: { include_usage: true } }),
      );
      const last = chunks.pop();
      const choices = chunks.map((chunk) => chunk.choices[0]);
      return [
        choices[0].delta.role,
        choices.map(({ delta }) => delta.content ?? "").join(""),
        choices.flatMap(({ finish_reason }) => finish_reason ?? []),
        [last.choices, last.usage.total_tokens],
        new Set([...chunks, last].map(({ id }) => id)).size,
      ];
    },
    chat_choices: async () => {
      const { choices } = await create({ temperature: 1.5, seed: 3, n: 3, max_tokens: 30 });
      const texts = new Set(choices.map(({ message }) => message.content));
      return [choices.map(({ index }) => index), texts.size];
    },
    chat_choices_streamed: async () => {
      const fields = { temperature: 1.5, seed: 3, n: 3 };
      const texts = ["", "", ""];
      for await (const { choices } of await create({ ...fields, stream: true }))
        for (const { index, delta } of choices) texts[index] += delta.content ?? "";
      const whole = (await create(fields)).choices.map(({ message }) => message.content);
      return texts.map((text, index) => text === whole[index] && text !== "");
    },
    chat_logprobs: async () => {
      const [{ logprobs }] = (await create({ logprobs: true, top_logprobs: 2 })).choices;
      const bytes = logprobs.content.flatMap((token) => token.bytes);
      return [
        Buffer.from(bytes).toString("utf-8"),
        logprobs.content.map(({ top_logprobs: [first, second], token, logprob }) =>
          [first.token === token, first.logprob === logprob, second.logprob <= logprob].every(
            Boolean,
          ),
        ),
      ];
    },
    chat_stopped: async () => {
      const [{ message, finish_reason }] = (await create({ stop: ["time"] })).choices;
      return [message.content, finish_reason];
    },
    chat_extra_fields: async () => {
      const { choices } = await create({ top_k: 5, min_p: 0.1, return_token_ids: true });
      return [choices[0].message.content, choices[0].token_ids.length];
    },
    chat_goes_on_with_an_answer: async () => {
      const first = await create({});
      const messages = [USER, first.choices[0].message, { role: "user", content: "Go on." }];
      const second = await create({ messages });
      return second.usage.prompt_tokens > first.usage.total_tokens;
    },
    chat_ignored_field: async () => {
      const { response } = await create({ metadata: { a: "b" } }).withResponse();
      return response.headers.get("x-splitserve-ignored-fields");
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
    structured: async () => {
      const [{ message, finish_reason }] = (
        await completions.parse({ ...place, response_format: RESPONSE_FORMAT })
      ).choices;
      return [JSON.parse(message.content), finish_reason];
    },
    structured_by_helper: async () => {
      const response_format = standardResponseFormat(PLACE_SCHEMA, "place");
      return (await completions.parse({ ...place, response_format })).choices[0].message.parsed;
    },
    structured_and_streamed: async () => {
      const response_format = standardResponseFormat(PLACE_SCHEMA, "place");
      const stream = completions.stream({ ...place, response_format });
      return (await stream.finalChatCompletion()).choices[0].message.parsed;
    },
    structured_and_cut_off: async () => {
      const response_format = standardResponseFormat(PLACE_SCHEMA, "place");
      const cut = { ...place, response_format, max_completion_tokens: 2 };
      return completions.parse(cut).catch((error) => error.constructor.name);
    },
    json_object: async () => {
      const [{ message }] = (
        await create({ ...TERSE, response_format: { type: "json_object" } })
      ).choices;
      return message.content.trimStart()[0];
    },
  };
};
