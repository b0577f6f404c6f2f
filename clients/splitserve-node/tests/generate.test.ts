// One request after another against a real scheduler; the truth is worked out without one.

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { after, afterEach, before, test } from "node:test";

import { create } from "@bufbuild/protobuf";

import * as splitserve from "splitserve";
import { Client, type GenerationEvent, type SamplingParams, type TokenLogprob } from "splitserve";
import { decodeModel } from "../dist/decoding.js";
import { errorOfCall, errorOfReason } from "../dist/errors.js";
import { GetModelResponseSchema } from "../dist/gen/splitserve/scheduler/v1/scheduler_pb.js";
import { FakeService } from "./support/fake-service.js";
import { failure } from "./support/scripted-server.js";

const PROMPT = [3, 4, 5];
const LONG = { seed: 17, maxTokens: 60 };

let service: FakeService;
let client: Client;
let throughProxy: Client;

before(async () => {
  service = await FakeService.start();
  client = new Client(service.address);
  throughProxy = new Client(service.proxy);
});
// Whatever a request was, nothing of it is left.
afterEach(() => service.do("wait_idle"));
after(async () => {
  client.close();
  throughProxy.close();
  await service.stop();
});

/** Reads on to the `count`th token, and leaves the rest unread. */
async function readTokens(
  events: AsyncIterator<GenerationEvent>,
  count: number,
): Promise<number[]> {
  const tokenIds: number[] = [];
  while (tokenIds.length < count) {
    const { value } = await events.next();
    assert.equal(value?.type, "tokens");
    tokenIds.push(...value.tokenIds);
  }
  return tokenIds;
}

async function expectedTokens(params: SamplingParams): Promise<readonly number[]> {
  const [first] = await service.expect(PROMPT, params);
  assert.ok(first);
  return first.tokenIds;
}

for (const [name, params] of Object.entries<SamplingParams>({
  "a greedy sequence": { seed: 0, temperature: 0, maxTokens: 9 },
  "a negative seed": { seed: -(2n ** 63n), maxTokens: 9 },
  "the largest seed": { seed: 2n ** 63n - 1n, maxTokens: 9 },
  "a stop token": { seed: 5, maxTokens: 200, stopTokenIds: [7, 8, 9] },
  "several sequences": { seed: 5, n: 3, maxTokens: 12, stopTokenIds: [7, 8, 9] },
  "the best of several": { seed: 5, n: 2, bestOf: 4, maxTokens: 6 },
  "beam search": { seed: 5, n: 2, beamSearch: { width: 3, lengthPenalty: 0.5 }, maxTokens: 6 },
})) {
  test(`complete brings the expected tokens of ${name}`, async () => {
    const { completions, usage } = await client.complete(PROMPT, params);

    const expected = await service.expect(PROMPT, params);
    assert.deepEqual(
      completions.map(({ logprobs: _, ...rest }) => rest),
      expected,
    );
    assert.equal(usage.numPromptTokens, 3);
    const numOutput = expected.reduce((sum, each) => sum + each.tokenIds.length, 0);
    assert.equal(usage.numOutputTokens, numOutput);
  });
}

test("generate brings each token once, and a finish", async () => {
  const events: GenerationEvent[] = [];
  for await (const event of client.generate(PROMPT, { seed: 1, maxTokens: 5 })) events.push(event);

  const tokenIds = events.flatMap((event) => (event.type === "tokens" ? event.tokenIds : []));
  assert.deepEqual(tokenIds, await expectedTokens({ seed: 1, maxTokens: 5 }));
  assert.deepEqual(events.at(-1), {
    type: "finish",
    reason: "length",
    usage: { numPromptTokens: 3, numOutputTokens: 5, numCachedTokens: 0, numPreemptions: 0 },
  });
});

test("generate brings the scores of tokens and prompt when they are asked for", async () => {
  const params = { seed: 1, maxTokens: 5, numLogprobs: 2, numPromptLogprobs: 1 };

  const { completions, promptLogprobs, tokenIds } = await client.complete(PROMPT, params);

  const scores = completions[0]?.logprobs ?? [];
  assert.deepEqual(
    scores.map((each) => each.tokenId),
    tokenIds,
  );
  assert.deepEqual(
    scores.map((each) => each.logprob),
    await service.do("score", { token_ids: tokenIds }),
  );
  assert.ok(scores.every((each: TokenLogprob) => each.rank === 1 && each.top.length === 2));
  assert.deepEqual(
    promptLogprobs.map((each) => each.tokenId),
    PROMPT.slice(1),
  );
});

test("a request goes on where the caller says", async () => {
  const expected = await expectedTokens(LONG);

  const rest = await client.complete(PROMPT, LONG, { resumeTokenIds: expected.slice(0, 20) });
  const several = await client.complete(
    PROMPT,
    { ...LONG, n: 2 },
    { resumeTokenIds: new Map([[0, expected]]) },
  );

  assert.deepEqual(rest.tokenIds, expected.slice(20));
  const [, second] = await service.expect(PROMPT, { ...LONG, n: 2 });
  assert.deepEqual(
    several.completions.map((each) => each.tokenIds),
    [[], second?.tokenIds],
  );
});

test("no token is lost or doubled when the network breaks in the middle of a stream", async () => {
  await service.do("hold", { after: 7 });
  const events = throughProxy.generate(PROMPT, LONG);
  const first = await readTokens(events, 5);
  await service.do("wait_held");
  assert.ok(((await service.do("cut")) as number) > 0);
  await service.do("release");

  const rest = await splitserve.collectGeneration(events);

  assert.deepEqual([...first, ...rest.tokenIds], await expectedTokens(LONG));
  assert.equal(rest.usage.numOutputTokens, LONG.maxTokens);
});

test("no token is lost or doubled of several sequences when the scheduler is killed and comes back", async () => {
  const params = { ...LONG, n: 3 };
  await service.do("hold", { after: 7 });
  const events = client.generate(PROMPT, params);
  const seen: number[][] = [[], [], []];
  const note = (event: GenerationEvent): void => {
    if (event.type === "tokens") seen[event.index]?.push(...event.tokenIds);
  };
  while (seen.flat().length < 6) note((await events.next()).value as GenerationEvent);
  await service.do("wait_held");
  await service.do("kill_scheduler");
  await service.do("release");
  await service.do("start_scheduler");
  for await (const event of events) note(event);

  const expected = await service.expect(PROMPT, params);
  assert.deepEqual(
    seen,
    expected.map((each) => each.tokenIds),
  );
});

test("leaving the loop aborts the request", async () => {
  await service.do("hold", { after: 3 });
  for await (const _ of client.generate(PROMPT, LONG)) break;

  await service.endsBefore(LONG.maxTokens / 2);
});

test("a signal aborts the request while it is waited for, and its reason is thrown", async () => {
  const stopping = new AbortController();
  await service.do("hold", { after: 3 });
  const events = client.generate(PROMPT, LONG, { signal: stopping.signal });
  await readTokens(events, 1);
  const reading = splitserve.collectGeneration(events);
  stopping.abort(new Error("enough"));

  await assert.rejects(reading, /enough/);
  await service.endsBefore(LONG.maxTokens / 2);
  await assert.rejects(client.complete(PROMPT, LONG, { signal: stopping.signal }), /enough/);
});

test("requests that are left at any point leave nothing behind", async () => {
  const several = new Client(service.proxy);
  const leave = async (number: number): Promise<void> => {
    const stopping = new AbortController();
    const events = several.generate([1, number], LONG, { signal: stopping.signal });
    const tokenIds = number % 3 === 0 ? [] : await readTokens(events, number);
    if (number % 2 === 0) setImmediate(() => stopping.abort(new Error("enough")));
    else await events.return();
    await splitserve.collectGeneration(events).catch(() => tokenIds);
    assert.deepEqual(getEventListeners(stopping.signal, "abort"), []);
  };

  for (let round = 0; round < 4; round++) {
    await Promise.all(Array.from({ length: 8 }, (_, index) => leave(8 * round + index + 1)));
  }
  await service.do("wait_idle");
  several.close();
  throughProxy.close();
  await service.do("wait_disconnected");
  throughProxy = new Client(service.proxy);
});

test("abort ends a request by its id", async () => {
  await service.do("hold", { after: 3 });
  const events = client.generate(PROMPT, LONG, { requestId: "mine" });
  const first = await readTokens(events, 1);
  await assert.rejects(
    client.complete(PROMPT, LONG, { requestId: "mine" }),
    splitserve.RequestIdInUse,
  );
  await client.abort("mine");
  await service.do("release");

  const { completions } = await splitserve.collectGeneration(events);

  assert.equal(completions[0]?.reason, "aborted");
  const had = [...first, ...(completions[0]?.tokenIds ?? [])];
  assert.deepEqual(had, (await expectedTokens(LONG)).slice(0, had.length));
  await assert.rejects(client.abort("mine"), { name: "RequestUnknown", reason: "REQUEST_UNKNOWN" });
});

for (const [prompt, params, reason] of [
  [[], {}, "PROMPT_EMPTY"],
  [[128], {}, "TOKEN_OUT_OF_RANGE"],
  [PROMPT, { temperature: -1 }, "SAMPLING_PARAMS_INVALID"],
  [new Array(300).fill(1), {}, "PROMPT_TOO_LONG"],
] as [number[], SamplingParams, string][]) {
  test(`a request is refused with ${reason}`, async () => {
    await assert.rejects(client.complete(prompt, params), { name: "InvalidRequest", reason });
  });
}

test("every reason of the server gives the error that it gives in Python", async () => {
  // Services alone see these, or whoever watches a scheduler.
  const between = /EXECUTOR|REGISTRY|CONTRACT|MODEL_MISMATCH|SUPERSEDED|WATCH/;
  const classes = (await service.do("list_errors")) as Record<string, [string, string, number]>;

  for (const [reason, [ofCall, inBand, code]] of Object.entries(classes)) {
    if (between.test(reason)) continue;
    const raised = errorOfCall(Object.assign(new Error(), failure(code, reason)));
    assert.deepEqual(
      [reason, raised.name, errorOfReason(reason, "").name],
      [reason, ofCall, inBand],
    );
  }
});

test("a reason not to serve that is not known yet is no error", () => {
  const said = [0, 1, 2, 3, 4, 5, 99].map(
    (readiness) => decodeModel(create(GetModelResponseSchema, { readiness })).readiness,
  );
  const known = ["ready", "no_executor", "no_progress", "draining", "executors_failing"];
  assert.deepEqual(said, ["unknown", ...known, "unknown"]);
});

test("model and executors are as the scheduler knows them", async () => {
  const model = await client.getModel();
  const { executors, ...counts } = await client.listExecutors();

  assert.deepEqual([model.name, model.vocabSize, model.maxModelLen], ["fake", 128, 256]);
  assert.deepEqual([model.defaultSamplingParams, model.readiness], [{}, "ready"]);
  const [executor] = executors;
  assert.deepEqual([executor?.isConnected, executor?.isDraining], [true, false]);
  assert.deepEqual([executors.length, executor?.modelName], [1, "fake"]);
  assert.deepEqual(counts, { numUnassignedRequests: 0, numUnfittingRequests: 0 });
  assert.deepEqual([executor?.numDeviceBlocks, executor?.numFreeDeviceBlocks], [64, 64]);
  await assert.rejects(client.getTokenizerFiles(), splitserve.TokenizerUnavailable);
});
