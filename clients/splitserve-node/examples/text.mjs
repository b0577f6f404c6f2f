// Text in and out, with the tokenizer that the server hands out: node text.mjs HOST:PORT PROMPT
import { Tokenizer } from "@huggingface/tokenizers";
import { Client } from "splitserve";

const [, , address, prompt = "Once upon a time"] = process.argv;
const client = new Client(address);
// In this order: if another model is served by the time, requests are refused, not misread.
const { digest: modelDigest } = await client.getModel();
const files = await client.getTokenizerFiles();
const [tokenizerFile, configFile] = ["tokenizer.json", "tokenizer_config.json"].map((name) =>
  JSON.parse(files.get(name)?.toString() ?? "{}"),
);
const tokenizer = new Tokenizer(tokenizerFile, configFile);

/** @type {number[]} */
const tokenIds = [];
let shown = "";
const params = { seed: 5, maxTokens: 16 };
for await (const event of client.generate(tokenizer.encode(prompt).ids, params, { modelDigest })) {
  if (event.type === "tokens") tokenIds.push(...event.tokenIds);
  const text = tokenizer.decode(tokenIds, { skip_special_tokens: true });
  // A character may be split between tokens: until it is whole, what is decoded ends like this.
  if (event.type === "finish" || !text.endsWith("\ufffd")) {
    process.stdout.write(text.slice(shown.length));
    shown = text;
  }
}
client.close();
