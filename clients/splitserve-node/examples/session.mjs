// Many requests over one stream, read side by side: node session.mjs HOST:PORT
import { Client } from "splitserve";

const client = new Client(process.argv[2]);
const session = client.session();

/** @param {number} seed */
async function run(seed) {
  const tokenIds = [];
  for await (const event of session.submit([1, 2, 3], { seed, maxTokens: 8, ignoreEos: true })) {
    if (event.type === "tokens") tokenIds.push(...event.tokenIds);
  }
  return `seed ${seed}: ${tokenIds.join(" ")}`;
}

console.log((await Promise.all([5, 6, 7].map(run))).join("\n"));
session.close();
client.close();
