// A client goes on at another scheduler when its own is lost or stops, if it knows one or is told.

import assert from "node:assert/strict";
import { test } from "node:test";

import { status } from "@grpc/grpc-js";

import { Client, credentials, Draining, InvalidRequest, type GenerationEvent } from "splitserve";
import { serverStream } from "../dist/calls.js";
import { Channel } from "../dist/channel.js";
import { encode } from "../dist/encoding.js";
import { Readiness, SchedulerService } from "../dist/gen/splitserve/scheduler/v1/scheduler_pb.js";
import {
  failure,
  finish,
  promptOf,
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

/** One that stops, at its first call after a token, and names the others. */
async function stopping(...named: ScriptedServer[]): Promise<[ScriptedServer, string]> {
  const server = new ScriptedServer();
  const addresses = await Promise.all(named.map((each) => each.start()));
  server.script = function* (request, call) {
    if (call > 0) {
      yield* rest(request);
      return;
    }
    yield tokens([0]);
    server.readiness = Readiness.DRAINING;
    throw failure(status.UNAVAILABLE, "DRAINING", undefined, addresses.join());
  };
  for (const each of named) each.script = (request) => rest(request);
  return [server, await server.start()];
}

test("a stream goes on at a scheduler that one names which stops", async () => {
  const named = new ScriptedServer();
  const [draining, address] = await stopping(named);
  const client = new Client(address, { timing: new VirtualTime() });

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual([draining.requests.length, named.requests.length], [1, 1]);
  // The next request goes there, too.
  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual([draining.requests.length, named.requests.length], [1, 2]);
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("a stream waits for its scheduler when its client follows nobody", async () => {
  const named = new ScriptedServer();
  const [draining, address] = await stopping(named);
  const client = new Client(address, { timing: new VirtualTime(), followsPeers: false });

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual([draining.requests.length, named.requests.length], [2, 0]);
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("no key goes to another host that a scheduler names", async () => {
  const named = new ScriptedServer();
  const [draining, address] = await stopping(named);
  // By name another host, as far as is known.
  const client = new Client(address.replace("127.0.0.1", "localhost"), {
    timing: new VirtualTime(),
    apiKey: "sk-ss-a1-the-secret-of-alice",
  });

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual([draining.requests.length, named.requests.length], [2, 0]);
  assert.deepEqual(named.brought, []);
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("a client follows four times, and all its streams go together", async () => {
  const servers = Array.from({ length: 6 }, () => new ScriptedServer());
  const addresses = await Promise.all(servers.map((server) => server.start()));
  for (const [place, server] of servers.entries()) {
    const next = addresses[place + 1] ?? "";
    server.readiness = place === 0 ? Readiness.DRAINING : Readiness.READY;
    server.script = (request) => {
      if (place === 4) return rest(request);
      throw failure(status.UNAVAILABLE, "DRAINING", undefined, next);
    };
  }
  const client = new Client(addresses[0], { timing: new VirtualTime() });
  const reads = [1, 2, 3].map((prompt) => read(client.generate([prompt], { maxTokens: 6 })));

  assert.deepEqual(await Promise.all(reads), Array(3).fill([0, 1, 2, 3, 4, 5]));
  // It is where it may go by now; the next one is not believed.
  const last = servers[4] ?? assert.fail();
  last.script = () => {
    throw failure(status.UNAVAILABLE, "DRAINING", undefined, addresses[5]);
  };
  last.readiness = Readiness.DRAINING;
  await assert.rejects(read(client.generate([4], { maxTokens: 6 })), Draining);
  assert.equal(servers[5]?.requests.length, 0);
  client.close();
  for (const server of servers) server.stop();
});

test("a request of a session goes on where another stops, refused or under way", async () => {
  const named = new ScriptedServer();
  const other = await named.start();
  const draining = new ScriptedServer();
  const address = await draining.start();
  const bye = failure(status.UNAVAILABLE, "DRAINING", undefined, other);
  draining.sessionScript = function* ({ action }) {
    const handle = action.value?.handle ?? 0;
    if (promptOf(action) === 1) {
      yield { handles: [handle], tokenIds: [0] };
      return;
    }
    // The second is refused, and then the stream ends for all.
    draining.readiness = Readiness.DRAINING;
    const refusal = { reason: "DRAINING", message: "it stops", schedulers: [other] };
    yield { events: [{ handle, event: { case: "rejected", value: refusal } }] };
    throw bye;
  };
  named.sessionScript = function* ({ action }) {
    const handle = action.value?.handle ?? 0;
    yield { handles: [handle], tokenIds: [9] };
    yield { events: [{ handle, event: { case: "finish", value: { reason: 2, usage: {} } } }] };
  };
  const client = new Client(address, { timing: new VirtualTime() });
  const session = client.session();
  const running = session.submit([1]);
  await running.next();

  const refused = session.submit([2]);
  assert.deepEqual(await Promise.all([read(running), read(refused)]), [[9], [9]]);
  assert.deepEqual(named.sessionMessages.map(({ action }) => promptOf(action)).sort(), [1, 2]);
  session.close();
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("a request follows though nobody serves yet where it goes", async () => {
  const named = new ScriptedServer();
  const [draining, address] = await stopping(named);
  named.readiness = Readiness.NO_EXECUTOR;
  for (let number = 0; number < 6; number++) {
    const client = new Client(address, { timing: new VirtualTime() });
    draining.requests.length = 0;
    assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
    assert.equal(draining.requests.length, 1);
    client.close();
  }
  for (const server of [draining, named]) server.stop();
});

test("a new request waits where its client has gone while no executor is there yet", async () => {
  const named = new ScriptedServer();
  const [draining, address] = await stopping(named);
  const client = new Client(address, { timing: new VirtualTime() });
  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);

  named.requests.length = 0;
  named.script = (request, call) => {
    if (call < 3) throw failure(status.FAILED_PRECONDITION, "MODEL_NOT_READY");
    return rest(request);
  };
  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  assert.equal(named.requests.length, 4);
  client.close();
  for (const server of [draining, named]) server.stop();
});

test("a client that knows several by name leaves one that stops", async () => {
  const servers = [new ScriptedServer(), new ScriptedServer()];
  const addresses = await Promise.all(servers.map((server) => server.start()));
  let left: ScriptedServer | undefined;
  for (const server of servers) {
    server.script = function* (request) {
      if (left === undefined) {
        left = server;
        server.readiness = Readiness.DRAINING;
        throw failure(status.UNAVAILABLE, "DRAINING");
      }
      assert.notEqual(left, server);
      yield* rest(request);
    };
  }
  const named = addresses.map((address) => address.replace("127.0.0.1", "localhost"));
  const client = new Client(named.join(), { timing: new VirtualTime() });

  // It had no token yet.
  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  client.close();
  for (const server of servers) server.stop();
});

test("a client finds the schedulers that a name stands for", async () => {
  const server = new ScriptedServer();
  server.script = (request) => rest(request);
  const address = (await server.start()).replace("127.0.0.1", "localhost");
  const client = new Client(`dns:${address}`, { timing: new VirtualTime() });

  assert.deepEqual(await read(client.generate([1], { maxTokens: 6 })), [0, 1, 2, 3, 4, 5]);
  client.close();
  server.stop();
});

test("a stream comes to its end over a channel that takes no new call", async () => {
  const server = new ScriptedServer();
  let goOn!: () => void;
  const closed = new Promise<void>((resolve) => (goOn = resolve));
  server.script = async function* () {
    yield tokens([0]);
    await closed;
    yield tokens([1]);
    yield finish();
  };
  const channel = new Channel(await server.start(), { credentials: undefined });
  const { generate } = SchedulerService.method;
  const { signal } = new AbortController();
  const message = encode(generate.input, { promptTokenIds: [1] });
  const responses = serverStream(channel, generate, message, { apiKey: undefined, signal });

  const events: (string | undefined)[] = [];
  for await (const { event } of responses) {
    events.push(event.case);
    channel.close();
    goOn();
  }
  assert.deepEqual(events, ["tokens", "tokens", "finish"]);
  server.stop();
});

test("tls and credentials are not both taken", () => {
  const options = { tls: {}, credentials: credentials.createInsecure() };
  assert.throws(() => new Client("a:1", options), InvalidRequest);
});

test("addresses are refused when they make no sense", () => {
  assert.throws(() => new Client("here:1,there"), InvalidRequest);
});
