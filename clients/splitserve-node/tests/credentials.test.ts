// What a client says of who it is, and to whom: against a server that follows a script.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, beforeEach, test } from "node:test";

import { ServerCredentials, status } from "@grpc/grpc-js";

import { CallerUnknown, Client, credentials, InvalidRequest, QuotaExceeded } from "splitserve";
import { Readiness } from "../dist/gen/splitserve/scheduler/v1/scheduler_pb.js";
import { PYTHON, ROOT } from "./support/fake-service.js";
import { failure, finish, ScriptedServer, tokens } from "./support/scripted-server.js";
import { VirtualTime } from "./support/virtual-time.js";

const KEY = "sk-ss-a1-the-secret-of-alice";
let server: ScriptedServer;
let directory: string;

before(() => {
  directory = mkdtempSync(join(tmpdir(), "splitserve-"));
  const made = spawnSync(PYTHON, ["-m", "splitserve_cli", "certs", directory], { cwd: ROOT });
  assert.equal(made.status, 0, String(made.stderr));
});
after(() => rmSync(directory, { recursive: true }));
beforeEach(() => {
  server = new ScriptedServer();
  server.script = () => [tokens([7]), finish()];
});
afterEach(() => server.stop());

function file(name: string): Buffer {
  return readFileSync(join(directory, name));
}

/** Asks for certificates of the authority. */
function secured(): ServerCredentials {
  const pair = { private_key: file("scheduler.key"), cert_chain: file("scheduler.crt") };
  return ServerCredentials.createSsl(file("ca.crt"), [pair], true);
}

test("every call brings the key that the function says then", async () => {
  let number = 0;
  const client = new Client(await server.start(), { apiKey: () => `${KEY}${number++}` });
  server.sessionScript = ({ action }) =>
    action.case === "submit"
      ? [
          {
            events: [
              {
                handle: action.value.handle,
                event: { case: "finish", value: { reason: 2, usage: {} } },
              },
            ],
          },
        ]
      : [];

  await client.complete([1]);
  await client.abort("any");
  const session = client.session();
  for await (const _ of session.submit([1]));
  session.close();
  client.close();

  // The first one was asked for when the client was made.
  assert.deepEqual(
    server.brought,
    [1, 2, 3].map((each) => `Bearer ${KEY}${each}`),
  );
});

test("no call brings a key when there is none", async () => {
  const client = new Client(await server.start());
  await client.complete([1]);
  client.close();
  assert.deepEqual(server.brought, [""]);
});

for (const apiKey of ["", "two words", "é", "line\nbreak", "x".repeat(8193)]) {
  test(`a key of ${apiKey.length} characters that is none is refused and not shown`, () => {
    assert.throws(
      () => new Client("127.0.0.1:1", { apiKey }),
      (error: unknown) => {
        assert.ok(error instanceof InvalidRequest);
        assert.match(error.message, /allowed: 1 to 8192/);
        assert.ok(apiKey === "" || !error.message.includes(apiKey));
        return true;
      },
    );
  });
}

test("a caller that is not known is told so at once", async () => {
  server.script = () => {
    throw failure(status.UNAUTHENTICATED, "CALLER_UNKNOWN");
  };
  const client = new Client(await server.start(), { apiKey: KEY });
  await assert.rejects(client.complete([1]), CallerUnknown);
  client.close();
  assert.equal(server.requests.length, 1);
});

test("a quota is raised when nothing has begun, and waited for when a stream goes on", async () => {
  const time = new VirtualTime();
  const client = new Client(await server.start(), { timing: time });
  server.script = () => {
    throw failure(status.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 20_000);
  };
  await assert.rejects(client.complete([1]), QuotaExceeded);

  server.script = function* (_, call) {
    if (call === 2) throw failure(status.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 20_000);
    yield tokens([call]);
    if (call === 1) throw { code: status.UNAVAILABLE, details: "the connection broke" };
    yield finish();
  };
  const [sequence] = (await client.complete([1])).completions;
  client.close();

  assert.deepEqual([...(sequence?.tokenIds ?? [])], [1, 3]);
  assert.ok(time.pausesMs.includes(20_000));
});

test("a client with a certificate of the authority is answered", async () => {
  const address = await server.start(secured());
  const ours = credentials.createSsl(file("ca.crt"), file("operator.key"), file("operator.crt"));
  const client = new Client(address, { credentials: ours, apiKey: KEY });
  await client.complete([1]);
  client.close();
  assert.deepEqual(server.brought, [`Bearer ${KEY}`]);
});

for (const [ca, numFollowed] of [
  ["ca.crt", 1],
  [undefined, 0],
] as const) {
  test(`a key goes to another host that is named ${numFollowed} times with ${ca}`, async () => {
    const named = new ScriptedServer();
    named.script = () => [finish()];
    const other = await named.start(secured());
    server.script = function* (_, call) {
      if (call > 0) {
        yield finish();
        return;
      }
      yield tokens([7]);
      server.readiness = Readiness.DRAINING;
      throw failure(status.UNAVAILABLE, "DRAINING", undefined, other);
    };
    const address = (await server.start(secured())).replace("127.0.0.1", "localhost");
    const pair = { key: file("operator.key"), certificate: file("operator.crt") };
    const secrets =
      ca === undefined
        ? { credentials: credentials.createSsl(file("ca.crt"), pair.key, pair.certificate) }
        : { tls: { ca: file(ca), ...pair } };
    const client = new Client(address, { ...secrets, apiKey: KEY, timing: new VirtualTime() });

    assert.deepEqual((await client.complete([1])).completions[0]?.tokenIds, [7]);
    assert.deepEqual(
      [named.requests.length, new Set(named.brought).size],
      Array(2).fill(numFollowed),
    );
    client.close();
    named.stop();
  });
}

test("a client says how it tried when the server wants something else", async () => {
  const address = await server.start(secured());
  const plain = new Client(address);
  await assert.rejects(plain.complete([1]), {
    name: "ServerUnreachable",
    message: `cannot connect to ${address} in plain text: no server answers, or it wants TLS`,
  });
  plain.close();

  const open = new ScriptedServer();
  const other = await open.start();
  const secure = new Client(other, { credentials: credentials.createSsl(file("ca.crt")) });
  await assert.rejects(secure.complete([1]), {
    name: "ServerUnreachable",
    message: `cannot connect to ${other} with TLS: no server answers, or it wants plain text, or another certificate`,
  });
  secure.close();
  open.stop();
});
