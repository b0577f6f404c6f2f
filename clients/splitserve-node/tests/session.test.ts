// Many requests over one stream of a real scheduler.

import assert from "node:assert/strict";
import { after, afterEach, before, beforeEach, test } from "node:test";

import * as splitserve from "splitserve";
import { Client, type SamplingParams, type Session, type SessionStream } from "splitserve";
import { FakeService } from "./support/fake-service.js";

let service: FakeService;
let client: Client;
let session: Session;

before(async () => {
  service = await FakeService.start();
});
beforeEach(() => {
  client = new Client(service.proxy);
  session = client.session();
});
// Whatever a request was, nothing of it is left.
afterEach(async () => {
  session.close();
  client.close();
  await service.do("release");
  await service.do("wait_idle");
});
after(() => service.stop());

/** Submits one request for each of `params`, the prompt of the nth is [1, n]. */
function submitAll(params: readonly SamplingParams[]): SessionStream[] {
  return params.map((each, number) => session.submit([1, number], each));
}

/** Reads all of them to their ends, side by side; they must bring the expected tokens. */
async function checkAll(
  streams: SessionStream[],
  params: readonly SamplingParams[],
): Promise<void> {
  const read = await Promise.all(streams.map((stream) => splitserve.collectGeneration(stream)));
  for (const [number, { completions }] of read.entries()) {
    const expected = await service.expect([1, number], params[number] ?? {});
    assert.deepEqual(
      completions.map((each) => each.tokenIds),
      expected.map((each) => each.tokenIds),
    );
  }
}

function mixed(maxTokens: number): SamplingParams[] {
  const plain = Array.from({ length: 5 }, (_, seed) => ({ seed, maxTokens: maxTokens + seed }));
  return [...plain, { seed: 8, n: 2, maxTokens }, { seed: 9, n: 1, bestOf: 2, maxTokens }];
}

test("a session keeps requests apart when many run at once", async () => {
  await checkAll(submitAll(mixed(10)), mixed(10));
});

test("a session continues all requests when its stream breaks", async () => {
  await service.do("hold", { after: 6 });
  const streams = submitAll(mixed(20));
  await service.do("wait_held");
  assert.ok(((await service.do("cut")) as number) > 0);
  await service.do("release");

  await checkAll(streams, mixed(20));
});

test("a session continues all requests when the scheduler is killed and comes back", async () => {
  await service.do("hold", { after: 6 });
  const streams = submitAll(mixed(20));
  await service.do("wait_held");
  await service.do("kill_scheduler");
  await service.do("release");
  await service.do("start_scheduler");

  await checkAll(streams, mixed(20));
});

test("a session fails one request alone when the server rejects it", async () => {
  const good = session.submit([1, 0], { seed: 1, maxTokens: 5 });
  const bad = session.submit([], { maxTokens: 3 });

  await assert.rejects(splitserve.collectGeneration(bad), {
    name: "InvalidRequest",
    reason: "PROMPT_EMPTY",
  });
  await checkAll([good], [{ seed: 1, maxTokens: 5 }]);
});

test("a session refuses what cannot be sent", async () => {
  const fraction = session.submit([1], { maxTokens: 1.5 });
  await assert.rejects(splitserve.collectGeneration(fraction), splitserve.InvalidRequest);
  const options = { timeoutMs: 5 } as object;
  assert.throws(() => session.submit([1], {}, options), /options has no timeoutMs/);
});

test("a session fails one request alone when it is larger than the server takes", async () => {
  const good = session.submit([1, 0], { seed: 1, maxTokens: 5 });
  const large = session.submit(new Array(5_000_000).fill(1), { maxTokens: 3 });

  await assert.rejects(splitserve.collectGeneration(large), { reason: "MESSAGE_TOO_LARGE" });
  await checkAll([good], [{ seed: 1, maxTokens: 5 }]);
});

test("a request of a session ends when it is aborted, and the others do not", async () => {
  await service.do("hold", { after: 6 });
  const good = session.submit([1, 0], { seed: 1, maxTokens: 40 });
  const stream = session.submit([1, 1], { seed: 2, maxTokens: 200 });
  await stream.next();
  stream.abort();
  await service.do("release");

  const { completions } = await splitserve.collectGeneration(stream);

  assert.equal(completions[0]?.reason, "aborted");
  stream.abort();
  await checkAll([good], [{ seed: 1, maxTokens: 40 }]);
});

test("a signal ends a request of a session with its reason", async () => {
  await service.do("hold", { after: 6 });
  const stopping = new AbortController();
  const good = session.submit([1, 0], { seed: 1, maxTokens: 40 });
  const stream = session.submit([1, 1], { seed: 2, maxTokens: 200 }, { signal: stopping.signal });
  await stream.next();
  stopping.abort(new Error("enough"));

  await assert.rejects(splitserve.collectGeneration(stream), /enough/);
  await service.do("release");
  await checkAll([good], [{ seed: 1, maxTokens: 40 }]);
});

test("leaving the loop over a request of a session aborts it", async () => {
  await service.do("hold", { after: 6 });
  const stream = session.submit([1, 1], { seed: 2, maxTokens: 200 });
  for await (const _ of stream) break;
  assert.deepEqual(await stream.next(), { done: true, value: undefined });

  await service.endsBefore(100);
});

test("what a session has unfinished is aborted when it is closed, and it takes no more", async () => {
  await service.do("hold", { after: 6 });
  const stream = session.submit([1, 1], { seed: 2, maxTokens: 200 });
  await stream.next();
  session.close();

  const { completions } = await splitserve.collectGeneration(stream);

  assert.equal(completions[0]?.reason, "aborted");
  assert.throws(() => session.submit([1]), splitserve.ClientClosed);
  await service.endsBefore(100);
});

test("a request that is not read keeps the others not waiting, and loses nothing", async () => {
  const unread = session.submit([1, 0], { seed: 0, maxTokens: 200 });
  for (let seed = 1; seed < 4; seed++) {
    const read = await splitserve.collectGeneration(
      session.submit([1, 1], { seed, maxTokens: 200 }),
    );
    const [expected] = await service.expect([1, 1], { seed, maxTokens: 200 });
    assert.deepEqual(read.tokenIds, expected?.tokenIds);
  }

  await checkAll([unread], [{ seed: 0, maxTokens: 200 }]);
});
