// Completions.

import { gather, PROMPT } from "./questions.mjs";

export const completionCalls = (client, model) => {
  const create = (fields) =>
    client.completions.create({ model, prompt: PROMPT, temperature: 0, max_tokens: 6, ...fields });

  return {
    completion: async () => {
      const { object, choices, usage } = await create({});
      return [object, choices[0].text, choices[0].finish_reason, usage.total_tokens];
    },
    completion_streamed: async () => {
      const chunks = await gather(
        await create({ stream: true, stream_options: { include_usage: true } }),
      );
      const last = chunks.pop();
      const text = chunks.map(({ choices }) => choices[0].text).join("");
      return [text, last.choices, last.usage.total_tokens];
    },
    completion_of_several_prompts: async () =>
      (await create({ prompt: [PROMPT, "The fox", PROMPT] })).choices.map(({ index, text }) => [
        index,
        text,
      ]),
    completion_echoed: async () => {
      const [{ text, logprobs }] = (await create({ max_tokens: 2, echo: true, logprobs: 1 }))
        .choices;
      const [first, ...others] = logprobs.token_logprobs;
      return [text, logprobs.tokens, logprobs.text_offset, first, others.every((x) => x <= 0)];
    },
  };
};
