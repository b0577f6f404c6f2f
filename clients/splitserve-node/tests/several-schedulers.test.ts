// A client that knows several schedulers goes on at another when its own is lost.

import assert from "node:assert/strict";
import { test } from "node:test";

import { status } from "@grpc/grpc-js";

import { Client, InvalidRequest, type GenerationEvent } from "splitserve";
import {
  failure,
  finish,
  ScriptedServer,
  tokens,
  type Response,
} from "./support/scripted-server.js";
import { VirtualTime } from "./support/virtual-time.js";

async function read(events: AsyncIterable<GenerationEvent>): Promise<number[]> {
  const tokenIds: number[] = [];
  for await (const event of events) if (event.type === "tokens") tokenIds.push(...event.tokenIds);
  return tokenIds;
}

function* rest(request: { resumeTokenIds: number[] }): Iterable<Response> {
  for (let token = request.resumeTokenIds.length; token < 6; token++) yield tokens([token]);
  yield finish();
}

test("a stream goes on at the other scheduler when its own is gone", async () => {
  const servers = [new ScriptedServer(), new ScriptedServer()];
  const addresses = await Promise.all(servers.map((server) => server.start()));
  const client = new Client(addresses.join());
  let dead: ScriptedServer | undefined;
  for (const server of servers) {
    server.script = async function* (request) {
      if (dead !== undefined) {
        yield* rest(request);
        return;
      }
      yield tokens([0]);
      yield tokens([1]);
      // What was sent is there by then.
      await new Promise((resolve) => setImmediate(resolve));
      dead = server;
      server.stop();
    };
  }

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);

  const other = servers.find((server) => server !== dead);
  assert.equal(dead?.requests.length, 1);
  assert.equal(other?.requests.length, 1);
  client.close();
  for (const server of servers) server.stop();
});

test("a stream waits for its scheduler when that names others, which nobody chose", async () => {
  const [draining, named] = [new ScriptedServer(), new ScriptedServer()];
  const [address, other] = [await draining.start(), await named.start()];
  draining.script = function* (request, call) {
    if (call === 0) {
      yield tokens([0]);
      throw failure(status.UNAVAILABLE, "DRAINING", undefined, other);
    }
    yield* rest(request);
  };
  const client = new Client(address, { timing: new VirtualTime() });

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);

  assert.deepEqual([draining.requests.length, named.requests.length], [2, 0]);
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("addresses are refused when they make no sense", () => {
  assert.throws(() => new Client("here:1,there:2"), InvalidRequest);
});
