// Operators send executors away, and take them back, against a real scheduler.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client, InvalidRequest, SplitserveError } from "splitserve";
import { FakeService } from "./support/fake-service.js";

const PROMPT = [3, 4, 5];
const PARAMS = { seed: 17, maxTokens: 20 };

async function withService(use: (service: FakeService, client: Client) => Promise<void>) {
  const service = await FakeService.start();
  const client = new Client(service.address);
  try {
    await use(service, client);
  } finally {
    client.close();
    await service.stop();
  }
}

async function executorOf(client: Client) {
  const { executors } = await client.listExecutors();
  return executors[0];
}

function hasReason(reason: string): (error: unknown) => boolean {
  return (error) => error instanceof SplitserveError && error.reason === reason;
}

test("an executor that drains is taken back, and what runs there goes on", () =>
  withService(async (service, client) => {
    const address = (await executorOf(client))?.address ?? "";
    await service.do("hold", { after: 3 });
    const completing = client.complete(PROMPT, PARAMS);
    await service.do("wait_held");

    const draining = client.drainExecutor(address, { timeoutMs: 3_600_000 });
    const undone = assert.rejects(draining, hasReason("DRAIN_UNDONE"));
    while (!(await executorOf(client))?.isDraining);
    await client.undrainExecutor(address);
    await undone;

    assert.equal((await executorOf(client))?.isDraining, false);
    await service.do("release");
    const [expected] = await service.expect(PROMPT, PARAMS);
    assert.deepEqual((await completing).completions[0]?.tokenIds, expected?.tokenIds);
  }));

test("an executor is gone when it was drained", () =>
  withService(async (_, client) => {
    const address = (await executorOf(client))?.address ?? "";
    const drained = await client.drainExecutor(address);
    assert.deepEqual(drained, { numMovedRequests: 0, isLost: false });
    assert.equal(await executorOf(client), undefined);
  }));

test("what makes no sense is refused by name", () =>
  withService(async (_, client) => {
    const unknown = hasReason("EXECUTOR_UNKNOWN");
    await assert.rejects(client.drainExecutor("nobody:1"), unknown);
    await assert.rejects(client.undrainExecutor("nobody:1"), unknown);
    const { address } = (await executorOf(client)) ?? { address: "" };
    await assert.rejects(client.drainExecutor(address, { timeoutMs: NaN }), InvalidRequest);
    const tooLong = client.drainExecutor(address, { timeoutMs: 3_600_001 });
    await assert.rejects(tooLong, hasReason("DRAIN_TIMEOUT_INVALID"));
  }));
