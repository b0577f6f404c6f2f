// A scheduler in this process that says what the test tells it to.

import {
  create,
  fromBinary,
  toBinary,
  type DescMethod,
  type MessageInitShape,
} from "@bufbuild/protobuf";
import { anyPack, type Any } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";

import { ErrorInfoSchema, RetryInfoSchema } from "../../dist/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../../dist/gen/google/rpc/status_pb.js";
import {
  SchedulerService,
  type AbortRequest,
  type GenerateRequest,
  type GenerateResponseSchema,
  type GetModelResponseSchema,
  Readiness,
  type SessionRequest,
  type SessionResponseSchema,
} from "../../dist/gen/splitserve/scheduler/v1/scheduler_pb.js";

export type Response = MessageInitShape<typeof GenerateResponseSchema>;
/** What one Generate call brings: responses, and at the end perhaps an error. */
export type Script = (
  request: GenerateRequest,
  call: number,
) => AsyncIterable<Response> | Iterable<Response>;

export type SessionResponse = MessageInitShape<typeof SessionResponseSchema>;
/** What one Session call brings after each message of the client; an error ends the call. */
export type SessionScript = (message: SessionRequest, call: number) => Iterable<SessionResponse>;

export class ScriptedServer {
  readonly requests: GenerateRequest[] = [];
  /** All that sessions were sent, in order. */
  readonly sessionMessages: SessionRequest[] = [];
  readonly aborted: string[] = [];
  /** What each call brought as `authorization`. */
  readonly brought: string[] = [];
  /** Resolves when a call was cancelled by its client. */
  readonly cancelled: Promise<void>;
  script: Script = () => [];
  sessionScript: SessionScript = () => [];
  readiness = Readiness.READY;
  #numSessions = 0;
  #noteCancelled!: () => void;
  readonly #server = new grpc.Server();

  constructor() {
    this.cancelled = new Promise((resolve) => (this.#noteCancelled = resolve));
  }

  async start(credentials = grpc.ServerCredentials.createInsecure()): Promise<string> {
    const { generate, session, abort, getModel } = SchedulerService.method;
    this.#server.addService(
      {
        generate: definition(generate),
        session: definition(session),
        abort: definition(abort),
        getModel: definition(getModel),
      },
      {
        getModel: (
          call: grpc.ServerUnaryCall<object, object>,
          answer: grpc.sendUnaryData<MessageInitShape<typeof GetModelResponseSchema>>,
        ) => {
          this.#note(call);
          answer(null, { readiness: this.readiness });
        },
        session: (call: grpc.ServerDuplexStream<SessionRequest, SessionResponse>) =>
          this.#session(call, this.#numSessions++),
        generate: (call: grpc.ServerWritableStream<GenerateRequest, Response>) =>
          void this.#generate(call),
        abort: (
          call: grpc.ServerUnaryCall<AbortRequest, object>,
          answer: grpc.sendUnaryData<object>,
        ) => {
          this.#note(call);
          this.aborted.push(call.request.requestId);
          answer(null, {});
        },
      },
    );
    const bind = this.#server.bindAsync.bind(this.#server);
    const port = await new Promise<number>((resolve, reject) => {
      bind("127.0.0.1:0", credentials, (error, bound) => (error ? reject(error) : resolve(bound)));
    });
    return `127.0.0.1:${port}`;
  }

  stop(): void {
    this.#server.forceShutdown();
  }

  #session(call: grpc.ServerDuplexStream<SessionRequest, SessionResponse>, number: number): void {
    this.#note(call);
    call.on("data", (message: SessionRequest) => {
      this.sessionMessages.push(message);
      try {
        for (const response of this.sessionScript(message, number)) call.write(response);
      } catch (error) {
        call.emit("error", error);
      }
    });
  }

  #note(call: { metadata: grpc.Metadata }): void {
    this.brought.push(call.metadata.get("authorization").join());
  }

  async #generate(call: grpc.ServerWritableStream<GenerateRequest, Response>): Promise<void> {
    this.#note(call);
    this.requests.push(call.request);
    call.on("cancelled", () => this.#noteCancelled());
    try {
      for await (const response of this.script(call.request, this.requests.length - 1)) {
        call.write(response);
      }
      call.end();
    } catch (error) {
      call.emit("error", error);
    }
  }
}

/** How often sessions were sent a request with this prompt. */
export function numSubmitted(server: ScriptedServer, prompt: number): number {
  return server.sessionMessages.filter(({ action }) => promptOf(action) === prompt).length;
}

/** The first token of what a session submits. */
export function promptOf(action: SessionRequest["action"]): number | undefined {
  return action.case === "submit" ? action.value.request?.promptTokenIds[0] : undefined;
}

function definition(method: DescMethod): grpc.MethodDefinition<any, any> {
  return {
    path: `/${method.parent.typeName}/${method.name}`,
    requestStream: method.methodKind === "bidi_streaming",
    responseStream: method.methodKind !== "unary",
    requestSerialize: (bytes: Buffer) => bytes,
    requestDeserialize: (bytes) => fromBinary(method.input, bytes),
    responseSerialize: (init) => Buffer.from(toBinary(method.output, create(method.output, init))),
    responseDeserialize: (bytes) => bytes,
  };
}

/** A status as splitserve sends it; `schedulers`: addresses of others that it names. */
export function failure(
  code: grpc.status,
  reason: string,
  retryDelayMs?: number,
  schedulers = "",
): object {
  const named: Record<string, string> = schedulers === "" ? {} : { schedulers };
  const info = { reason, domain: "splitserve", metadata: named };
  const details: Any[] = [anyPack(ErrorInfoSchema, create(ErrorInfoSchema, info))];
  if (retryDelayMs !== undefined) {
    const retryDelay = {
      seconds: BigInt(Math.trunc(retryDelayMs / 1000)),
      nanos: (retryDelayMs % 1000) * 1e6,
    };
    details.push(anyPack(RetryInfoSchema, create(RetryInfoSchema, { retryDelay })));
  }
  const metadata = new grpc.Metadata();
  const status = create(StatusSchema, { code, message: reason, details });
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
  return { code, details: `said: ${reason}`, metadata };
}

export function tokens(tokenIds: number[], index = 0): Response {
  return { event: { case: "tokens", value: { tokenIds, index } } };
}

export function finish(): Response {
  return { event: { case: "finish", value: { reason: 2, usage: { numPromptTokens: 1 } } } };
}
