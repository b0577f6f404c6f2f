// Calls over a channel: typed by the descriptors of the protos, with errors of this package.

import {
  fromBinary,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageShape,
} from "@bufbuild/protobuf";
import type * as grpc from "@grpc/grpc-js";

import { metadataOf, type ApiKey } from "./api-key.js";
import type { Channel } from "./channel.js";
import { errorOfCall, ServerUnreachable } from "./errors.js";

export type Responses<O extends DescMessage> = AsyncGenerator<MessageShape<O>, void, void>;

/** A stream both ways. */
export interface BidiCall<O extends DescMessage> {
  /** Sends a message that is encoded already; the transport keeps what the server does not take yet. */
  send(message: Buffer): void;
  /** Throws a SplitserveError. */
  readonly responses: Responses<O>;
}

/** What a call has besides its message. */
export interface CallOptions {
  readonly apiKey: ApiKey | undefined;
  readonly signal: AbortSignal;
  readonly timeoutMs?: number | undefined;
}

/** The answer to a short call. Throws a SplitserveError, or the reason of the signal. */
export async function unary<I extends DescMessage, O extends DescMessage>(
  channel: Channel,
  method: DescMethodUnary<I, O>,
  message: Buffer,
  options: CallOptions,
): Promise<MessageShape<O>> {
  for await (const response of serverStream(channel, method, message, options)) return response;
  throw new ServerUnreachable("the call ended without an answer");
}

/** The call begins at once. Throws a SplitserveError, or the reason of the signal. */
export function serverStream<I extends DescMessage, O extends DescMessage>(
  channel: Channel,
  method: DescMethodUnary<I, O> | DescMethodServerStreaming<I, O>,
  message: Buffer,
  { apiKey, signal, timeoutMs }: CallOptions,
): Responses<O> {
  const call = channel.client.makeServerStreamRequest(
    pathOf(method),
    same,
    decoder(method.output),
    message,
    metadataOf(apiKey),
    timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs },
  );
  return responsesOf(call, signal);
}

export function bidi<I extends DescMessage, O extends DescMessage>(
  channel: Channel,
  method: DescMethodBiDiStreaming<I, O>,
  { apiKey, signal }: CallOptions,
): BidiCall<O> {
  const call: grpc.ClientDuplexStream<
    Buffer,
    MessageShape<O>
  > = channel.client.makeBidiStreamRequest(
    pathOf(method),
    same,
    decoder(method.output),
    metadataOf(apiKey),
  );
  return {
    send: (message) => void call.write(message),
    responses: responsesOf(call, signal),
  };
}

async function* responsesOf<O extends DescMessage>(
  call: AsyncIterable<MessageShape<O>> & ResponseStream,
  signal: AbortSignal,
): Responses<O> {
  const cancel = (): void => call.cancel();
  // A call that nobody reads any more may still report its end.
  call.on("error", () => undefined);
  signal.addEventListener("abort", cancel, { once: true });
  try {
    signal.throwIfAborted();
    for await (const response of call) {
      signal.throwIfAborted();
      yield response;
    }
  } catch (error) {
    signal.throwIfAborted();
    throw errorOfCall(error);
  } finally {
    signal.removeEventListener("abort", cancel);
    call.cancel();
  }
}

interface ResponseStream {
  cancel(): void;
  on(event: "error", listener: () => void): unknown;
}

function pathOf(method: { parent: { typeName: string }; name: string }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

/** Messages are encoded before a call begins, so that what cannot be encoded is no broken call. */
function same(message: Buffer): Buffer {
  return message;
}

function decoder<O extends DescMessage>(schema: O): (bytes: Buffer) => MessageShape<O> {
  return (bytes) => fromBinary(schema, bytes);
}
