// What a session does when its stream breaks: against a server that follows a script.

import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";

import { status } from "@grpc/grpc-js";

import * as splitserve from "splitserve";
import { Client, type GenerationEvent, type Session, type SessionStream } from "splitserve";
import {
  numSubmitted,
  promptOf,
  ScriptedServer,
  type SessionResponse,
} from "./support/scripted-server.js";
import { VirtualTime } from "./support/virtual-time.js";

const GOOD = 1;
const ABORTED = 2;

let server: ScriptedServer;
let time: VirtualTime;
let client: Client;
let session: Session;
let address: string;

beforeEach(async () => {
  server = new ScriptedServer();
  time = new VirtualTime();
  address = await server.start();
  client = new Client(address, { timing: time, retry: { giveUpAfterMs: 30_000 } });
  session = client.session();
});
afterEach(() => {
  session.close();
  client.close();
  server.stop();
});

const broken = { code: status.UNAVAILABLE, details: "the connection broke" };

function token(handle: number, tokenId: number): SessionResponse {
  return { handles: [handle], tokenIds: [tokenId] };
}

function finish(handle: number): SessionResponse {
  return { events: [{ handle, event: { case: "finish", value: { reason: 2, usage: {} } } }] };
}

function rejected(handle: number, reason: string): SessionResponse {
  return { events: [{ handle, event: { case: "rejected", value: { reason, message: reason } } }] };
}

async function read(stream: SessionStream): Promise<[number[], string]> {
  const { tokenIds, completions } = await splitserve.collectGeneration(stream);
  return [[...tokenIds], completions[0]?.reason ?? ""];
}

async function next(stream: SessionStream): Promise<GenerationEvent | void> {
  return (await stream.next()).value;
}

/** Gives every request a token, breaks at the first abort, and then ends what is submitted again. */
function breakAtAbort(): void {
  server.sessionScript = function* ({ action }, call) {
    if (action.case === "abort") throw broken;
    const handle = action.value?.handle ?? 0;
    if (action.value?.request?.resumeTokenIds.length === 0) yield token(handle, 7);
    if (call > 0) yield finish(handle);
  };
}

test("a request is not resumed when the stream breaks right after it was aborted", async () => {
  breakAtAbort();
  const good = session.submit([GOOD]);
  const aborted = session.submit([ABORTED]);
  await Promise.all([next(good), next(aborted)]);
  aborted.abort();
  aborted.abort();

  assert.deepEqual(await read(aborted), [[], "aborted"]);
  assert.deepEqual(await read(good), [[], "length"]);
  assert.equal(numSubmitted(server, ABORTED), 1);
  assert.equal(numSubmitted(server, GOOD), 2);
  assert.equal(server.sessionMessages.filter(({ action }) => action.case === "abort").length, 1);
});

test("a request is not resumed when the stream breaks right after its loop was left", async () => {
  breakAtAbort();
  const good = session.submit([GOOD]);
  for await (const _ of session.submit([ABORTED])) break;

  assert.deepEqual(await read(good), [[7], "length"]);
  assert.equal(numSubmitted(server, ABORTED), 1);
});

test("a request is not resumed when the stream breaks right after its signal", async () => {
  breakAtAbort();
  const stopping = new AbortController();
  const good = session.submit([GOOD]);
  const aborted = session.submit([ABORTED], {}, { signal: stopping.signal });
  await next(aborted);
  stopping.abort(new Error("enough"));

  await assert.rejects(read(aborted), /enough/);
  assert.deepEqual(await read(good), [[7], "length"]);
  assert.equal(numSubmitted(server, ABORTED), 1);
});

test("a request is not resumed when it is aborted while there is no stream", async () => {
  server.sessionScript = function* ({ action }, call) {
    if (call === 0) throw broken;
    yield finish(action.value?.handle ?? 0);
  };
  const good = session.submit([GOOD]);
  const aborted = session.submit([ABORTED]);
  time.beforeWake = () => aborted.abort();

  assert.deepEqual(await read(aborted), [[], "aborted"]);
  assert.deepEqual(await read(good), [[], "length"]);
  assert.ok(numSubmitted(server, ABORTED) <= 1);
});

test("a request is not submitted again when it is aborted while it waits for that", async () => {
  server.sessionScript = function* ({ action }, call) {
    const handle = action.value?.handle ?? 0;
    const isGood = promptOf(action) === GOOD;
    if (call === 0) {
      yield token(handle, 7);
      if (!isGood) throw broken;
    } else if (isGood) yield finish(handle);
    else yield rejected(handle, "QUEUE_FULL");
  };
  const good = session.submit([GOOD]);
  const aborted = session.submit([ABORTED]);
  time.beforeWake = () => {
    if (numSubmitted(server, ABORTED) === 2) aborted.abort();
  };

  assert.deepEqual(await read(aborted), [[7], "aborted"]);
  await read(good);
  assert.equal(numSubmitted(server, ABORTED), 2);
});

test("a signal ends a request with its reason when no server has it yet", async () => {
  const stopping = new AbortController();
  const stream = session.submit([ABORTED], {}, { signal: stopping.signal });
  stopping.abort(new Error("enough"));

  await assert.rejects(read(stream), /enough/);
});

test("a late request has the whole patience when others have used up theirs", async () => {
  server.sessionScript = () => {
    throw broken;
  };
  const early = session.submit([GOOD]);
  let late: SessionStream | undefined;
  let submittedAt = 0;
  time.beforeWake = () => {
    if (late !== undefined || time.now() < 120_000) return;
    submittedAt = time.now();
    late = session.submit([ABORTED]);
  };

  await assert.rejects(read(early), splitserve.ServerUnreachable);
  assert.ok(late !== undefined);
  await assert.rejects(read(late), splitserve.ServerUnreachable);
  assert.ok(time.now() - submittedAt > 25_000, `${time.now() - submittedAt}`);
});

test("patience begins anew when a stream has brought anything", async () => {
  server.sessionScript = function* ({ action }, call) {
    const handle = action.value?.handle ?? 0;
    if (promptOf(action) === GOOD) {
      yield token(handle, call);
      if (call < 40) throw broken;
    }
    if (call === 40) yield finish(handle);
  };
  const hasty = new Client(address, { timing: time, retry: { giveUpAfterMs: 1000 } });
  const busy = hasty.session();
  const waiting = busy.submit([ABORTED]);
  const progressing = busy.submit([GOOD]);

  assert.equal((await read(waiting))[1], "length");
  assert.equal((await read(progressing))[1], "length");
  busy.close();
  hasty.close();
});

test("a request fails with ModelChanged when another model is served where it goes on", async () => {
  server.sessionScript = function* ({ action }, call) {
    const handle = action.value?.handle ?? 0;
    if (call === 0) {
      yield token(handle, 7);
      throw broken;
    }
    assert.equal(action.case === "submit" && action.value.request?.modelDigest, "00ff");
    yield rejected(handle, "MODEL_CHANGED");
  };
  const stream = session.submit([GOOD], {}, { modelDigest: "00ff" });

  await assert.rejects(read(stream), splitserve.ModelChanged);
});
