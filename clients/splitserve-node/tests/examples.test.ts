// The examples, as programs of their own. The one with text is in test_node_client.py, beside ours.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { FakeService } from "./support/fake-service.js";

const EXAMPLES = new URL("../examples/", import.meta.url);
let service: FakeService;

before(async () => {
  service = await FakeService.start();
});
after(() => service.stop());

/** The lines that an example prints. */
async function run(name: string): Promise<string[]> {
  const program = fileURLToPath(new URL(name, EXAMPLES));
  const { stdout } = await promisify(execFile)(process.execPath, [program, service.address]);
  return stdout.trimEnd().split("\n");
}

async function expectedTokens(seed: number): Promise<readonly number[]> {
  const [completion] = await service.expect([1, 2, 3], { seed, maxTokens: 8 });
  return completion?.tokenIds ?? [];
}

test("generate.mjs prints the expected tokens and the finish", async () => {
  const lines = await run("generate.mjs");

  const tokens = lines.slice(0, -1).flatMap((line) => line.split(" ").slice(1).map(Number));
  assert.deepEqual(tokens, await expectedTokens(5));
  assert.equal(lines.at(-1), "finish length 8");
});

test("session.mjs prints the expected tokens of each request", async () => {
  const lines = await run("session.mjs");

  for (const [index, seed] of [5, 6, 7].entries()) {
    assert.equal(lines[index], `seed ${seed}: ${(await expectedTokens(seed)).join(" ")}`);
  }
});
