// Which trace a request says that it belongs to.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { context, ROOT_CONTEXT, trace, type SpanContext } from "@opentelemetry/api";
import { AsyncLocalStorageContextManager } from "@opentelemetry/context-async-hooks";

import { Client, type TraceContext } from "splitserve";
import { finish, ScriptedServer } from "./support/scripted-server.js";

const TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: SpanContext = { traceId: TRACE_ID, spanId: "00f067aa0ba902b7", traceFlags: 1 };
const OF_SPAN = `00-${TRACE_ID}-00f067aa0ba902b7-01`;
const GIVEN = `00-${"a".repeat(32)}-${"b".repeat(16)}-00`;

let server: ScriptedServer;
let client: Client;

before(async () => {
  context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable());
  server = new ScriptedServer();
  server.script = () => [finish()];
  server.sessionScript = function* ({ action }) {
    if (action.case !== "submit") return;
    const event = { case: "finish", value: { reason: 2, usage: {} } } as const;
    yield { events: [{ handle: action.value.handle, event }] };
  };
  client = new Client(await server.start());
});
after(() => {
  client.close();
  server.stop();
  context.disable();
});

async function sent(span?: SpanContext, traceContext?: TraceContext): Promise<string[][]> {
  const options = traceContext === undefined ? {} : { traceContext };
  const active = span === undefined ? ROOT_CONTEXT : trace.setSpanContext(ROOT_CONTEXT, span);
  await context.with(active, async () => {
    await client.complete([1], {}, options);
    const session = client.session();
    for await (const event of session.submit([1], {}, options)) assert.equal(event.type, "finish");
    session.close();
  });
  const { action } = server.sessionMessages.findLast(({ action }) => action.case === "submit")!;
  assert.equal(action.case, "submit");
  return [server.requests.at(-1), action.value.request].map((each) => [
    each?.traceparent ?? "none",
    each?.tracestate ?? "none",
  ]);
}

function both(traceparent: string, tracestate: string): string[][] {
  return [
    [traceparent, tracestate],
    [traceparent, tracestate],
  ];
}

test("a request belongs to the span that its caller gives", async () => {
  const traceContext = { traceparent: GIVEN, tracestate: "vendor=1" };
  assert.deepEqual(await sent(undefined, traceContext), both(GIVEN, "vendor=1"));
  assert.deepEqual(await sent(SPAN, { traceparent: GIVEN }), both(GIVEN, ""));
});

test("a request belongs to the active span when its caller gives none", async () => {
  assert.deepEqual(await sent(SPAN), both(OF_SPAN, ""));
  assert.deepEqual(await sent(SPAN, { traceparent: "" }), both("", ""));
});

test("a request belongs to no span outside of any, and to none that is invalid", async () => {
  assert.deepEqual(await sent(), both("", ""));
  assert.deepEqual(await sent({ ...SPAN, traceId: "0".repeat(32) }), both("", ""));
});

test("a name that is none is refused", async () => {
  const misspelt = { traceParent: GIVEN } as unknown as TraceContext;
  const asked = client.complete([1], {}, { traceContext: misspelt });
  await assert.rejects(asked, { message: /TraceContext has no traceParent/ });
});
