// Streams a completion, token ids in and out: node generate.mjs HOST:PORT
import { Client } from "splitserve";

const client = new Client(process.argv[2]);
for await (const event of client.generate([1, 2, 3], { seed: 5, maxTokens: 8, ignoreEos: true })) {
  if (event.type === "tokens") console.log("tokens", ...event.tokenIds);
  else console.log("finish", event.reason, event.usage.numOutputTokens);
}
client.close();
