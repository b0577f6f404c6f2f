// What the client does when the server says no, or nothing: against a server that follows a script.

import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";

import { status } from "@grpc/grpc-js";

import * as splitserve from "splitserve";
import { Client, type GenerationEvent } from "splitserve";
import {
  failure,
  finish,
  ScriptedServer,
  tokens,
  type Response,
} from "./support/scripted-server.js";
import { VirtualTime } from "./support/virtual-time.js";

let server: ScriptedServer;
let time: VirtualTime;
let client: Client;
let address: string;

beforeEach(async () => {
  server = new ScriptedServer();
  time = new VirtualTime();
  address = await server.start();
  client = new Client(address, { timing: time, retry: { giveUpAfterMs: 30_000 } });
});
afterEach(() => {
  client.close();
  server.stop();
});

async function read(events: AsyncIterable<GenerationEvent>): Promise<number[]> {
  const tokenIds: number[] = [];
  for await (const event of events) if (event.type === "tokens") tokenIds.push(...event.tokenIds);
  return tokenIds;
}

/** The tokens 0, 1, ... of a request of `count`, after those that it resumes with; cut before some. */
function counting(count: number, cutBefore: readonly number[], cut = failureless()) {
  const cuts = new Set(cutBefore);
  return function* (request: { resumeTokenIds: number[] }): Iterable<Response> {
    for (let token = request.resumeTokenIds.length; token < count; token++) {
      if (cuts.delete(token)) throw cut;
      yield tokens([token]);
    }
    yield finish();
  };
}

/** What a broken connection looks like. */
function failureless(): object {
  return { code: status.UNAVAILABLE, details: "the connection broke" };
}

test("generate continues where it was, with one seed and id, when the stream breaks twice", async () => {
  server.script = counting(8, [3, 4]);

  assert.deepEqual(await read(client.generate([1], { maxTokens: 8 })), [0, 1, 2, 3, 4, 5, 6, 7]);

  assert.deepEqual(
    server.requests.map((each) => each.resumeTokenIds),
    [[], [0, 1, 2], [0, 1, 2, 3]],
  );
  assert.equal(new Set(server.requests.map((each) => each.samplingParams?.seed)).size, 1);
  assert.equal(new Set(server.requests.map((each) => each.requestId)).size, 1);
});

for (const [code, reason] of [
  [status.FAILED_PRECONDITION, "MODEL_NOT_READY"],
  [status.UNAVAILABLE, "DRAINING"],
  [status.RESOURCE_EXHAUSTED, "STREAM_NOT_READ"],
] as const) {
  test(`generate goes on after ${reason} when it has tokens`, async () => {
    server.script = counting(3, [2], failure(code, reason));

    assert.deepEqual(await read(client.generate([1])), [0, 1, 2]);
  });
}

test("generate waits as long as the server says when its queue is full", async () => {
  server.script = counting(3, [1], failure(status.RESOURCE_EXHAUSTED, "QUEUE_FULL", 4321));

  await read(client.generate([1]));

  assert.deepEqual(time.pausesMs, [4321]);
});

test("generate throws QueueFull with its delay when it has no tokens yet", async () => {
  server.script = counting(3, [0], failure(status.RESOURCE_EXHAUSTED, "QUEUE_FULL", 4321));

  await assert.rejects(read(client.generate([1])), (error) => {
    assert.ok(error instanceof splitserve.QueueFull);
    assert.deepEqual(
      [error.reason, error.retryDelayMs, error.message],
      ["QUEUE_FULL", 4321, "said: QUEUE_FULL"],
    );
    return true;
  });
});

test("generate aborts its own stale request when the server still has it", async () => {
  server.script = function* (request, call) {
    if (call === 1) throw failure(status.ALREADY_EXISTS, "REQUEST_ID_IN_USE");
    yield* counting(3, call === 0 ? [1] : [])(request);
  };

  assert.deepEqual(await read(client.generate([1], {}, { requestId: "mine" })), [0, 1, 2]);
  assert.deepEqual(server.aborted, ["mine"]);
});

test("generate waits longer each time, and gives up, when attempts keep failing", async () => {
  server.script = () => {
    throw failureless();
  };

  await assert.rejects(read(client.generate([1])), splitserve.ServerUnreachable);

  assert.deepEqual(time.pausesMs.slice(0, 7), [100, 200, 400, 800, 1000, 1000, 1000]);
  const total = time.pausesMs.reduce((sum, each) => sum + each, 0);
  assert.ok(total > 27_000 && total <= 30_000, `${total}`);
});

test("generate counts its patience anew when there is progress", async () => {
  const hasty = new Client(address, { timing: time, retry: { giveUpAfterMs: 250 } });
  server.script = counting(4, [1, 2, 3]);

  await read(hasty.generate([1]));

  assert.deepEqual(time.pausesMs, [100, 100, 100]);
  hasty.close();
});

test("generate keeps its timeout over all attempts", async () => {
  server.script = () => {
    throw failureless();
  };

  await assert.rejects(
    read(client.generate([1], {}, { timeoutMs: 10_000 })),
    splitserve.DeadlineExceeded,
  );

  assert.equal(
    time.pausesMs.reduce((sum, each) => sum + each, 0),
    10_000,
  );
});

test("generate sends what is left of a deadline when it resumes", async () => {
  server.script = counting(2, [1]);

  await read(client.generate([1], {}, { scheduling: { deadlineMs: 1500 } }));

  const sent = server.requests.map(({ deadline }) => [deadline?.seconds, deadline?.nanos]);
  assert.deepEqual(sent, [
    [1n, 500_000_000],
    [1n, 400_000_000],
  ]);
});

test("generate resumes each of several sequences, and ends none of them twice", async () => {
  server.script = function* (_, call) {
    const ended = (index: number): Response => ({
      event: { case: "sequenceFinish", value: { index, reason: 2 } },
    });
    if (call === 0) {
      yield tokens([5], 0);
      yield tokens([7], 1);
      yield ended(1);
      throw failureless();
    }
    yield ended(1);
    yield tokens([6], 0);
    yield ended(0);
    yield finish();
  };

  const events: GenerationEvent[] = [];
  for await (const event of client.generate([1], { n: 2 })) events.push(event);

  const brought = events.flatMap((event) =>
    event.type === "tokens" ? [[event.index, ...event.tokenIds, event.finish?.reason]] : [],
  );
  assert.deepEqual(brought, [
    [0, 5, undefined],
    [1, 7, undefined],
    [1, "length"],
    [0, 6, undefined],
    [0, "length"],
  ]);
  const resumed = server.requests[1]?.resumeSequences.map(({ index, tokenIds }) => [
    index,
    tokenIds,
  ]);
  assert.deepEqual(resumed, [
    [0, [5]],
    [1, [7]],
  ]);
});

test("generate hands out nothing twice when the best come at the end and the stream breaks among them", async () => {
  server.script = function* (_, call) {
    yield tokens([5, 6], 0);
    if (call === 0) throw failureless();
    yield finish();
  };

  assert.deepEqual(await read(client.generate([1], { bestOf: 3 })), [5, 6]);
  assert.deepEqual(
    server.requests.map((each) => each.resumeSequences.length),
    [0, 0],
  );
});

test("generate throws what a finish says when the request failed", async () => {
  const error = { reason: "INVALID_LOGITS", message: "NaN" };
  server.script = () => [{ event: { case: "finish", value: { reason: 5, error } } }];

  await assert.rejects(read(client.generate([1])), {
    name: "RequestFailed",
    reason: "INVALID_LOGITS",
    message: "NaN",
  });
  assert.equal(server.requests.length, 1);
});

test("an error says nothing of its details when those are no message", async () => {
  server.script = () => {
    const broken = failure(status.INVALID_ARGUMENT, "") as {
      metadata: { set(k: string, v: Buffer): void };
    };
    broken.metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff, 0xff]));
    throw broken;
  };

  await assert.rejects(read(client.generate([1])), { name: "InvalidRequest", reason: "" });
});

test("a signal ends a pause, and its reason is what is thrown", async () => {
  const stopping = new AbortController();
  server.script = counting(2, [1]);
  time.beforeWake = () => stopping.abort(new Error("enough"));

  await assert.rejects(read(client.generate([1], {}, { signal: stopping.signal })), /enough/);
  assert.equal(server.requests.length, 1);
});

test("closing the client ends what runs, which is not tried again", async () => {
  server.script = async function* () {
    yield tokens([1]);
    await server.cancelled;
  };
  const events = client.generate([1]);

  await events.next();
  client.close();

  await assert.rejects(events.next(), splitserve.ClientClosed);
  await server.cancelled;
  await assert.rejects(client.getModel(), splitserve.ClientClosed);
  assert.deepEqual([server.requests.length, time.pausesMs], [1, []]);
});

test("nothing is tried again when no server was there in the first place", async () => {
  server.stop();

  await assert.rejects(read(client.generate([1])), {
    name: "ServerUnreachable",
    message: `cannot connect to ${address} in plain text: no server answers, or it wants TLS`,
  });
  assert.deepEqual(time.pausesMs, []);
});

test("generate sends each kind of grammar as its text", async () => {
  const grammars: splitserve.Grammar[] = [
    { jsonSchema: { type: "object" } },
    { jsonSchema: '{"const":1}' },
    { regex: "a+" },
    { lark: 'start: "a"' },
    { choices: ["yes", "no"] },
  ];

  server.script = () => [finish()];
  for (const grammar of grammars) await client.complete([1], { grammar });

  const sent = server.requests.map(({ samplingParams }) => {
    const kind = samplingParams?.grammar?.kind;
    return kind?.case === "choices" ? kind.value.texts : kind?.value;
  });
  assert.deepEqual(sent, ['{"type":"object"}', '{"const":1}', "a+", 'start: "a"', ["yes", "no"]]);
});

for (const [params, message] of [
  [{ max_tokens: 5 }, /SamplingParams has no max_tokens; allowed: temperature, /],
  [{ maxTokens: 1.5 }, /max_tokens.*1\.5/],
  [{ maxTokens: 2 ** 31 }, /2147483648/],
  [{ seed: 2 ** 53 }, /seed is 9007199254740992/],
  [{ seed: 2n ** 63n }, /9223372036854775808/],
  [{ allowedTokenIds: [] }, /allowedTokenIds is empty/],
  [{ beamSearch: { width: 2, earlyStopping: "soon" } }, /earlyStopping is soon/],
  [{ grammar: { json: "{}" } }, /grammar is not one of: jsonSchema, regex, lark, choices/],
  [{ grammar: { regex: "a", lark: "b" } }, /grammar is not one of/],
  [{ beamSearch: { with: 2 } }, /BeamSearch has no with/],
] as [object, RegExp][]) {
  test(`generate refuses ${String(message)} before anything is sent`, async () => {
    await assert.rejects(read(client.generate([1], params)), (error) => {
      assert.ok(error instanceof splitserve.InvalidRequest, String(error));
      assert.match(error.message, message);
      return true;
    });
    assert.equal(server.requests.length, 0);
  });
}

test("generate refuses a prompt that is text, and an option that is none", async () => {
  const text = "123" as unknown as number[];
  await assert.rejects(read(client.generate(text)), /token ids are numbers, not text/);
  const options = { timeout: 5 } as object;
  await assert.rejects(
    read(client.generate([1], {}, options)),
    /options has no timeout; allowed: requestId/,
  );
  assert.equal(server.requests.length, 0);
});
