// The span that the caller's own code works in, if it has any to do with OpenTelemetry.

import type { TraceContext } from "./types.js";

const NO_TRACE: TraceContext = { traceparent: "" };

// An application that traces has it; others need not install it.
const api = await import("@opentelemetry/api").catch(() => undefined);

/** Of the active context; of none without OpenTelemetry, or outside of spans. */
export function currentTrace(): TraceContext {
  const span = api?.trace.getSpanContext(api.context.active());
  if (api === undefined || span === undefined || !api.isSpanContextValid(span)) return NO_TRACE;
  const flags = span.traceFlags.toString(16).padStart(2, "0");
  const traceparent = `00-${span.traceId}-${span.spanId}-${flags}`;
  return { traceparent, tracestate: span.traceState?.serialize() ?? "" };
}
