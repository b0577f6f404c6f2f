// The client API: what applications, the command line and the gateway call.
//
// Token ids cross this API, text never does. A client fetches the tokenizer once (GetTokenizer),
// so it needs no model files.
//
// # Errors
//
// Every error carries a google.rpc.ErrorInfo in its status details, with domain "splitserve" and
// one of the reasons below; programs decide by reason, never by message. QUEUE_FULL and
// QUOTA_EXCEEDED also carry a google.rpc.RetryInfo. In a Session the same reasons arrive in-band (RequestError). This holds for
// every service on this port and for every executor's, the standard services included. What gRPC
// answers by itself comes without ErrorInfo: RESOURCE_EXHAUSTED for a message that is more than
// 1 MiB too large, UNIMPLEMENTED for an unknown compression, DEADLINE_EXCEEDED for the caller's own
// deadline, CANCELLED, and UNAVAILABLE or any other code when the connection or the process ends.
//
//   code                 reason                   meaning; may the client retry?
//   INVALID_ARGUMENT     PROMPT_EMPTY             no prompt tokens; no
//                        PROMPT_TOO_LONG          prompt leaves no room below max_model_len; no
//                                                 (where the KV cache is the limit:
//                                                 NEVER_FITS_KV_CACHE)
//                        TOKEN_OUT_OF_RANGE       a token id outside the vocabulary; no
//                        SAMPLING_PARAMS_INVALID  a parameter outside its range, named; no
//                        SCHEDULING_PARAMS_INVALID  priority, tenant, deadline, cache_salt or
//                                                 num_public_prefix_tokens outside its range,
//                                                 named; no
//                        NEVER_FITS_KV_CACHE      larger than the KV cache of any executor, see
//                                                 Lengths; no
//                        FEATURE_UNSUPPORTED      no executor has an ability it needs; no
//                        REQUEST_ID_INVALID       request_id is too long; no
//                        SESSION_PROTOCOL         a Session message that makes no sense; no
//                        MESSAGE_UNDECODABLE      the bytes are no message of the method; no
//   UNAUTHENTICATED      CALLER_UNKNOWN           no credential, or one that is not valid, see Callers;
//                                                 with another one
//   PERMISSION_DENIED    CALLER_NOT_ALLOWED       the caller may not do this, or not with this model,
//                                                 adapter or priority; no
//   ALREADY_EXISTS       REQUEST_ID_IN_USE        an unfinished request has this id; with a new id
//   NOT_FOUND            REQUEST_UNKNOWN          no unfinished request has this id; no
//                        TOKENIZER_UNAVAILABLE    the executors offer no tokenizer; no
//                        SERVICE_UNKNOWN          health of a service that is not here; no
//   RESOURCE_EXHAUSTED   QUEUE_FULL               too many requests wait, or calls of Health.Watch
//                                                 are open; after RetryInfo
//                        QUOTA_EXCEEDED           a limit of the caller's tenant, named; too many of
//                                                 its streams or GetTokenizer calls (Sizes); too
//                                                 many tokens that are nobody's; after RetryInfo
//                        MESSAGE_TOO_LARGE        see Sizes; no
//                        STREAM_NOT_READ          see Sizes; as after a broken stream
//   UNIMPLEMENTED        METHOD_UNKNOWN           no such method here; no
//   FAILED_PRECONDITION  MODEL_NOT_READY          no executor has registered yet; after a pause
//   FAILED_PRECONDITION  MODEL_CHANGED            another model than model_digest is served; encode
//                                                 the prompt again
//   UNAVAILABLE          DRAINING                 the scheduler is shutting down; elsewhere, after
//                                                 the first token with `resume_token_ids`
//   INTERNAL             INVARIANT_BROKEN         a fault of ours, details in the log; no
//
// A request that fails after it was accepted ends with a Finish whose `error` has INVARIANT_BROKEN
// or one of these reasons:
//
//   INVALID_LOGITS            the model's scores were NaN or infinite, or the request's constraints
//                             left no token to sample
//   GRAMMAR_INVALID           its grammar cannot be compiled, or only with more time or memory than
//                             that may take, or its resumed tokens do not follow it; no
//   ROW_FAILED                the executor could not compute one of its sequences; its adapter is
//                             not there, for example, or its grammar was not compiled in a minute
//   EXECUTOR_LOST_REPEATEDLY  executors were lost while they computed it, the last of them while
//                             it computed nothing else; or its steps failed again and again. It is
//                             the request: sent again, it may cost as many executors again; no
//   KV_CACHE_EXHAUSTED        its several sequences outgrew the KV cache, which they had to
//                             themselves; with fewer sequences or fewer tokens
//   DEADLINE_UNREACHABLE      it had no token yet and could not meet its deadline any more; with a
//                             later deadline
//
// # Draining
//
// A scheduler that shuts down refuses what is new with DRAINING, and ends what is left after a while
// with the same. If it was told of other schedulers of the model (--peers) it names them: the
// ErrorInfo has the metadata `schedulers`, RequestError the field, at most 8 addresses (host:port)
// of what it is itself. What waits then is ended at once, where nothing else of its stream runs.
// Whoever follows resumes there with the tokens so far, with the same security, and sends no
// credential to a host that it does not know to be of its operator.
//
// # Callers
//
// A scheduler with --api-keys or --jwt-issuer knows its callers: a call brings the metadata
// `authorization: Bearer CREDENTIAL`, an API key or a JWT, and without a valid one nothing but
// the standard health service answers (CALLER_UNKNOWN). A credential has a tenant and scopes. The
// scope `generate` is for every method of SchedulerService; `gateway` for those that carry other
// callers' requests: it opens a Session in which each SessionSubmit brings the credential of its own
// caller, asks for the model and the tokenizer, and calls Identify; `operator` for AdminService and
// GetModel. Where callers are known, request ids are those of their tenant: to all others an id of it
// is unknown. Without these options everybody may do everything, and ids are everybody's.
//
// # Lengths
//
// Two limits hold. max_model_len is what the model allows, or the scheduler's --max-model-len if that
// is less; a prompt of so many tokens or more is refused with PROMPT_TOO_LONG. And each executor has a
// KV cache of a certain size; a request is refused with NEVER_FITS_KV_CACHE if there is no executor
// whose cache holds it: its prompt and max_tokens, cut at max_model_len (without max_tokens, a token
// more than it has). Without max_tokens it ends where the limits of the executor that runs it end,
// with MODEL_LENGTH. GetModel says the lesser of the two limits of one sequence, for the executor
// where that is largest.
//
// What a cache of B blocks of b tokens holds: B x b tokens of a request with one sequence. Of s
// sequences side by side (s is n, best_of or beam_search.width) each may have (h + (B - h) / s) x b
// tokens; h = (number of prompt tokens - 1) / b blocks of the prompt are shared, and quotients are
// rounded down. Encoder input takes its own blocks of B first. If all layers of the model have a
// sliding window of W tokens, s x (W / b, rounded up, + 2) blocks hold sequences of any length.
//
// Where several reasons to end coincide, STOP comes before LENGTH before MODEL_LENGTH.
//
// # Sizes
//
// A message may have max_message_bytes (GetModel says it): 256 KiB, and 4 bytes more for each token
// that a request could bring: those that the executor's KV cache holds, or max_model_len if that is
// more (with a sliding window max_model_len x 128). It is at most 4 MiB, unless --max-model-len asks
// for more. Larger messages are refused before they are decoded. In a Session that ends the stream,
// since nobody knows yet which request it was.
//
// What lists and texts among sampling_params take has to fit in one step's message to an executor:
// all that is left of it, and half of it at least. A request with more is refused with
// SAMPLING_PARAMS_INVALID; one that fits waits while those that run leave it no room.
//
// A client reads its streams. What it has not read is kept, but a stream that holds more than
// --max-unread-mib (16 MiB), beyond what the flow control of HTTP/2 has under way, ends with
// STREAM_NOT_READ when a step brings it more: what it held is dropped, its requests are aborted at
// once, and the client gets the status when it reads on. So does the stream that holds most while
// all streams together hold more than 16 times that. The client may then continue its requests as
// after a broken stream. A Session that holds more than half of what it may is not read on, so
// whoever submits without reading is kept waiting. A Session has as many unfinished requests as the
// queues take (QUEUE_FULL).
//
// Where callers are known, a tenant has at most 1024 Generate and Session streams open. GetTokenizer
// goes on for 8 calls of a tenant at a time (of a host, where callers are not known); up to 248 more
// wait for their turn. Beyond either: QUOTA_EXCEEDED. A Session that submits beyond its tenant's
// quota is read more slowly, unless its caller submits for others.
//
// # Several sequences
//
// A request has several sequences if n or best_of is more than 1, or beam_search is given. They
// share the prompt and its KV blocks. Of those that are computed, n are returned, named by their
// index 0 .. n-1:
//   - Their tokens arrive as TokenChunks with that index, in a Session as well. With best_of > n or
//     beam_search no token is sent before all sequences have ended; index 0 then is the best.
//   - Each of them ends with a SequenceFinish, after its last TokenChunk and before the Finish of
//     the request. If the request ends with ABORTED or ERROR, those that had not ended get none.
//   - The Finish has the reason and the stop token of sequence 0, unless the request was ABORTED or
//     failed. Its usage counts the prompt once and the output tokens of the returned sequences.
// Sequence i samples with the seed (seed + i * 0x9E3779B97F4A7C15) mod 2^64, read as a signed
// 64-bit number; so sequence 0 gets the tokens that the request would get with n = 1.
//
// # Standard services
//
// The server also offers server reflection, so that grpcurl works, and grpc.health.v1.Health with
// these service names:
//   "alive"      SERVING as long as the process answers, also without an executor and while it is
//                being stopped. For probes that restart a process.
//   "ready", "" and "splitserve.scheduler.v1.SchedulerService"
//                SERVING while GetModelResponse.readiness is READY, NOT_SERVING otherwise. For
//                balancers and probes that send requests elsewhere.
// Executors have the same names; theirs are ready once the model is loaded, until they are stopped.

// @generated by protoc-gen-es v2.13.0 with parameter "target=ts,import_extension=js"
// @generated from file splitserve/scheduler/v1/scheduler.proto (package splitserve.scheduler.v1, syntax proto3)
/* eslint-disable */

import type { GenEnum, GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import { enumDesc, fileDesc, messageDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import type { Duration } from "@bufbuild/protobuf/wkt";
import { file_google_protobuf_duration } from "@bufbuild/protobuf/wkt";
import type { Message } from "@bufbuild/protobuf";

/**
 * Describes the file splitserve/scheduler/v1/scheduler.proto.
 */
export const file_splitserve_scheduler_v1_scheduler: GenFile = /*@__PURE__*/
  fileDesc("CidzcGxpdHNlcnZlL3NjaGVkdWxlci92MS9zY2hlZHVsZXIucHJvdG8SF3NwbGl0c2VydmUuc2NoZWR1bGVyLnYxIuwDCg9HZW5lcmF0ZVJlcXVlc3QSEgoKcmVxdWVzdF9pZBgBIAEoCRIYChBwcm9tcHRfdG9rZW5faWRzGAIgAygFEhgKEHJlc3VtZV90b2tlbl9pZHMYAyADKAUSQAoPc2FtcGxpbmdfcGFyYW1zGAQgASgLMicuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuU2FtcGxpbmdQYXJhbXMSEAoIcHJpb3JpdHkYBSABKAUSDgoGdGVuYW50GAYgASgJEisKCGRlYWRsaW5lGAcgASgLMhkuZ29vZ2xlLnByb3RvYnVmLkR1cmF0aW9uEg8KB2FkYXB0ZXIYCCABKAkSEgoKY2FjaGVfc2FsdBgJIAEoCRIbChNieXBhc3NfcHJlZml4X2NhY2hlGAogASgIEhkKEWVuY29kZXJfdG9rZW5faWRzGAsgAygFEkIKEHJlc3VtZV9zZXF1ZW5jZXMYDCADKAsyKC5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5SZXN1bWVkU2VxdWVuY2USFAoMbW9kZWxfZGlnZXN0GA0gASgJEiAKGG51bV9wdWJsaWNfcHJlZml4X3Rva2VucxgOIAEoBRITCgt0cmFjZXBhcmVudBgPIAEoCRISCgp0cmFjZXN0YXRlGBAgASgJIjMKD1Jlc3VtZWRTZXF1ZW5jZRINCgVpbmRleBgBIAEoBRIRCgl0b2tlbl9pZHMYAiADKAUitwcKDlNhbXBsaW5nUGFyYW1zEhgKC3RlbXBlcmF0dXJlGAEgASgCSACIAQESEgoFdG9wX2sYAiABKAVIAYgBARISCgV0b3BfcBgDIAEoAkgCiAEBEhIKBW1pbl9wGAQgASgCSAOIAQESHwoScmVwZXRpdGlvbl9wZW5hbHR5GAUgASgCSASIAQESHQoQcHJlc2VuY2VfcGVuYWx0eRgGIAEoAkgFiAEBEh4KEWZyZXF1ZW5jeV9wZW5hbHR5GAcgASgCSAaIAQESSgoKbG9naXRfYmlhcxgIIAMoCzI2LnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLlNhbXBsaW5nUGFyYW1zLkxvZ2l0Qmlhc0VudHJ5EhEKBHNlZWQYCSABKANIB4gBARIXCgptYXhfdG9rZW5zGAogASgFSAiIAQESFwoKbWluX3Rva2VucxgLIAEoBUgJiAEBEhYKDnN0b3BfdG9rZW5faWRzGAwgAygFEhIKCmlnbm9yZV9lb3MYDSABKAgSGQoMbnVtX2xvZ3Byb2JzGA4gASgFSAqIAQESIAoTbnVtX3Byb21wdF9sb2dwcm9icxgPIAEoBUgLiAEBEg4KAW4YECABKAVIDIgBARIUCgdiZXN0X29mGBEgASgFSA2IAQESOAoLYmVhbV9zZWFyY2gYEiABKAsyIy5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5CZWFtU2VhcmNoEhkKEWFsbG93ZWRfdG9rZW5faWRzGBMgAygFEkMKE2JhZF93b3Jkc190b2tlbl9pZHMYFCADKAsyJi5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5Ub2tlblNlcXVlbmNlEjEKB2dyYW1tYXIYFSABKAsyIC5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5HcmFtbWFyGjAKDkxvZ2l0Qmlhc0VudHJ5EgsKA2tleRgBIAEoBRINCgV2YWx1ZRgCIAEoAjoCOAFCDgoMX3RlbXBlcmF0dXJlQggKBl90b3Bfa0IICgZfdG9wX3BCCAoGX21pbl9wQhUKE19yZXBldGl0aW9uX3BlbmFsdHlCEwoRX3ByZXNlbmNlX3BlbmFsdHlCFAoSX2ZyZXF1ZW5jeV9wZW5hbHR5QgcKBV9zZWVkQg0KC19tYXhfdG9rZW5zQg0KC19taW5fdG9rZW5zQg8KDV9udW1fbG9ncHJvYnNCFgoUX251bV9wcm9tcHRfbG9ncHJvYnNCBAoCX25CCgoIX2Jlc3Rfb2YiIgoNVG9rZW5TZXF1ZW5jZRIRCgl0b2tlbl9pZHMYASADKAUifgoHR3JhbW1hchIVCgtqc29uX3NjaGVtYRgBIAEoCUgAEg8KBXJlZ2V4GAIgASgJSAASDgoEbGFyaxgDIAEoCUgAEjMKB2Nob2ljZXMYBCABKAsyIC5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5DaG9pY2VzSABCBgoEa2luZCIYCgdDaG9pY2VzEg0KBXRleHRzGAEgAygJIp4BCgpCZWFtU2VhcmNoEhIKBXdpZHRoGAEgASgFSACIAQESGwoObGVuZ3RoX3BlbmFsdHkYAiABKAJIAYgBARJCCg5lYXJseV9zdG9wcGluZxgDIAEoDjIqLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkJlYW1FYXJseVN0b3BwaW5nQggKBl93aWR0aEIRCg9fbGVuZ3RoX3BlbmFsdHki3QEKEEdlbmVyYXRlUmVzcG9uc2USEgoKcmVxdWVzdF9pZBgBIAEoCRI1CgZ0b2tlbnMYAiABKAsyIy5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5Ub2tlbkNodW5rSAASMQoGZmluaXNoGAMgASgLMh8uc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuRmluaXNoSAASQgoPc2VxdWVuY2VfZmluaXNoGAQgASgLMicuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuU2VxdWVuY2VGaW5pc2hIAEIHCgVldmVudCKnAQoKVG9rZW5DaHVuaxIRCgl0b2tlbl9pZHMYASADKAUSNwoIbG9ncHJvYnMYAiADKAsyJS5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5Ub2tlbkxvZ3Byb2ISPgoPcHJvbXB0X2xvZ3Byb2JzGAMgAygLMiUuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuVG9rZW5Mb2dwcm9iEg0KBWluZGV4GAQgASgFInEKDFRva2VuTG9ncHJvYhIQCgh0b2tlbl9pZBgBIAEoBRIPCgdsb2dwcm9iGAIgASgCEgwKBHJhbmsYAyABKAUSMAoDdG9wGAQgAygLMiMuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuVG9wTG9ncHJvYiIvCgpUb3BMb2dwcm9iEhAKCHRva2VuX2lkGAEgASgFEg8KB2xvZ3Byb2IYAiABKAIi9QEKDlNlcXVlbmNlRmluaXNoEg0KBWluZGV4GAEgASgFEjUKBnJlYXNvbhgCIAEoDjIlLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkZpbmlzaFJlYXNvbhIaCg1zdG9wX3Rva2VuX2lkGAMgASgFSACIAQESGQoRbnVtX291dHB1dF90b2tlbnMYBCABKAUSHwoSY3VtdWxhdGl2ZV9sb2dwcm9iGAUgASgCSAGIAQESEgoFc2NvcmUYBiABKAJIAogBAUIQCg5fc3RvcF90b2tlbl9pZEIVChNfY3VtdWxhdGl2ZV9sb2dwcm9iQggKBl9zY29yZSLSAQoGRmluaXNoEjUKBnJlYXNvbhgBIAEoDjIlLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkZpbmlzaFJlYXNvbhIaCg1zdG9wX3Rva2VuX2lkGAIgASgFSACIAQESLQoFdXNhZ2UYAyABKAsyHi5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5Vc2FnZRI0CgVlcnJvchgEIAEoCzIlLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLlJlcXVlc3RFcnJvckIQCg5fc3RvcF90b2tlbl9pZCJxCgVVc2FnZRIZChFudW1fcHJvbXB0X3Rva2VucxgBIAEoBRIZChFudW1fb3V0cHV0X3Rva2VucxgCIAEoBRIZChFudW1fY2FjaGVkX3Rva2VucxgDIAEoBRIXCg9udW1fcHJlZW1wdGlvbnMYBCABKAUicwoMUmVxdWVzdEVycm9yEg4KBnJlYXNvbhgBIAEoCRIPCgdtZXNzYWdlGAIgASgJEi4KC3JldHJ5X2RlbGF5GAMgASgLMhkuZ29vZ2xlLnByb3RvYnVmLkR1cmF0aW9uEhIKCnNjaGVkdWxlcnMYBCADKAkiyQEKDlNlc3Npb25SZXF1ZXN0EjgKBnN1Ym1pdBgBIAEoCzImLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLlNlc3Npb25TdWJtaXRIABI2CgVhYm9ydBgCIAEoCzIlLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLlNlc3Npb25BYm9ydEgAEjsKC3N1Ym1pc3Npb25zGAMgAygLMiYuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuU2Vzc2lvblN1Ym1pdEIICgZhY3Rpb24ibgoNU2Vzc2lvblN1Ym1pdBIOCgZoYW5kbGUYASABKAUSOQoHcmVxdWVzdBgCIAEoCzIoLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkdlbmVyYXRlUmVxdWVzdBISCgpjcmVkZW50aWFsGAMgASgJIh4KDFNlc3Npb25BYm9ydBIOCgZoYW5kbGUYASABKAUihwEKD1Nlc3Npb25SZXNwb25zZRIPCgdoYW5kbGVzGAEgAygFEhEKCXRva2VuX2lkcxgCIAMoBRI1CgZldmVudHMYAyADKAsyJS5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5TZXNzaW9uRXZlbnQSGQoRdGFrZXNfc3VibWlzc2lvbnMYBCABKAgikAIKDFNlc3Npb25FdmVudBIOCgZoYW5kbGUYASABKAUSNQoGdG9rZW5zGAIgASgLMiMuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuVG9rZW5DaHVua0gAEjEKBmZpbmlzaBgDIAEoCzIfLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkZpbmlzaEgAEjkKCHJlamVjdGVkGAQgASgLMiUuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuUmVxdWVzdEVycm9ySAASQgoPc2VxdWVuY2VfZmluaXNoGAUgASgLMicuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuU2VxdWVuY2VGaW5pc2hIAEIHCgVldmVudCIiCgxBYm9ydFJlcXVlc3QSEgoKcmVxdWVzdF9pZBgBIAEoCSIPCg1BYm9ydFJlc3BvbnNlIhEKD0dldE1vZGVsUmVxdWVzdCK/AgoQR2V0TW9kZWxSZXNwb25zZRIMCgRuYW1lGAEgASgJEg4KBmRpZ2VzdBgCIAEoCRINCgVkdHlwZRgDIAEoCRISCgp2b2NhYl9zaXplGAQgASgFEhwKFG1heF9tb2RlbF9sZW5fdG9rZW5zGAUgASgFEhUKDWVvc190b2tlbl9pZHMYBiADKAUSGQoRbWF4X251bV9zZXF1ZW5jZXMYByABKAUSGQoRbWF4X21lc3NhZ2VfYnl0ZXMYCSABKAMSSAoXZGVmYXVsdF9zYW1wbGluZ19wYXJhbXMYCiABKAsyJy5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5TYW1wbGluZ1BhcmFtcxI1CglyZWFkaW5lc3MYCyABKA4yIi5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5SZWFkaW5lc3MiJQoPSWRlbnRpZnlSZXF1ZXN0EhIKCmNyZWRlbnRpYWwYASABKAkicAoQSWRlbnRpZnlSZXNwb25zZRIVCg1rbm93c19jYWxsZXJzGAEgASgIEg4KBmNhbGxlchgCIAEoCRIOCgZ0ZW5hbnQYAyABKAkSDgoGc2NvcGVzGAQgAygJEhUKDW1heV91c2VfbW9kZWwYBSABKAgiFQoTR2V0VG9rZW5pemVyUmVxdWVzdCI3ChRHZXRUb2tlbml6ZXJSZXNwb25zZRIRCglmaWxlX25hbWUYASABKAkSDAoEZGF0YRgCIAEoDCqaAQoRQmVhbUVhcmx5U3RvcHBpbmcSIwofQkVBTV9FQVJMWV9TVE9QUElOR19VTlNQRUNJRklFRBAAEiEKHUJFQU1fRUFSTFlfU1RPUFBJTkdfSEVVUklTVElDEAESHgoaQkVBTV9FQVJMWV9TVE9QUElOR19BTFdBWVMQAhIdChlCRUFNX0VBUkxZX1NUT1BQSU5HX05FVkVSEAMqswEKDEZpbmlzaFJlYXNvbhIdChlGSU5JU0hfUkVBU09OX1VOU1BFQ0lGSUVEEAASFgoSRklOSVNIX1JFQVNPTl9TVE9QEAESGAoURklOSVNIX1JFQVNPTl9MRU5HVEgQAhIeChpGSU5JU0hfUkVBU09OX01PREVMX0xFTkdUSBADEhkKFUZJTklTSF9SRUFTT05fQUJPUlRFRBAEEhcKE0ZJTklTSF9SRUFTT05fRVJST1IQBSqqAQoJUmVhZGluZXNzEhkKFVJFQURJTkVTU19VTlNQRUNJRklFRBAAEhMKD1JFQURJTkVTU19SRUFEWRABEhkKFVJFQURJTkVTU19OT19FWEVDVVRPUhACEhkKFVJFQURJTkVTU19OT19QUk9HUkVTUxADEhYKElJFQURJTkVTU19EUkFJTklORxAEEh8KG1JFQURJTkVTU19FWEVDVVRPUlNfRkFJTElORxAFMuAEChBTY2hlZHVsZXJTZXJ2aWNlEmEKCEdlbmVyYXRlEiguc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuR2VuZXJhdGVSZXF1ZXN0Gikuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuR2VuZXJhdGVSZXNwb25zZTABEmAKB1Nlc3Npb24SJy5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5TZXNzaW9uUmVxdWVzdBooLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLlNlc3Npb25SZXNwb25zZSgBMAESVgoFQWJvcnQSJS5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5BYm9ydFJlcXVlc3QaJi5zcGxpdHNlcnZlLnNjaGVkdWxlci52MS5BYm9ydFJlc3BvbnNlEl8KCEdldE1vZGVsEiguc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuR2V0TW9kZWxSZXF1ZXN0Gikuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuR2V0TW9kZWxSZXNwb25zZRJfCghJZGVudGlmeRIoLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLklkZW50aWZ5UmVxdWVzdBopLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLklkZW50aWZ5UmVzcG9uc2USbQoMR2V0VG9rZW5pemVyEiwuc3BsaXRzZXJ2ZS5zY2hlZHVsZXIudjEuR2V0VG9rZW5pemVyUmVxdWVzdBotLnNwbGl0c2VydmUuc2NoZWR1bGVyLnYxLkdldFRva2VuaXplclJlc3BvbnNlMAFiBnByb3RvMw", [file_google_protobuf_duration]);

/**
 * One completion to generate, or several of one prompt.
 *
 * @generated from message splitserve.scheduler.v1.GenerateRequest
 */
export type GenerateRequest = Message<"splitserve.scheduler.v1.GenerateRequest"> & {
  /**
   * Names the request, for Abort and logs: at most 128 characters, unique among unfinished
   * requests. Empty: the server draws one.
   *
   * @generated from field: string request_id = 1;
   */
  requestId: string;

  /**
   * The prompt, at least one token.
   *
   * @generated from field: repeated int32 prompt_token_ids = 2;
   */
  promptTokenIds: number[];

  /**
   * Output tokens the client already has from an earlier, broken stream of this same request.
   * Generation continues after them with the same randomness (given the same seed); they are not
   * sent again, but count for max_tokens, penalties and usage. If they complete the request (their
   * last token is a stop token, or there are enough of them) it finishes at once; an earlier stop
   * token among them is not looked for. Only for a request with one sequence, otherwise
   * SAMPLING_PARAMS_INVALID; see resume_sequences.
   *
   * @generated from field: repeated int32 resume_token_ids = 3;
   */
  resumeTokenIds: number[];

  /**
   * How to choose tokens, and when to stop. Absent: all defaults.
   *
   * @generated from field: splitserve.scheduler.v1.SamplingParams sampling_params = 4;
   */
  samplingParams?: SamplingParams | undefined;

  /**
   * In [-100, 100], smaller is more urgent. Used by the queue policies `priority` and `deadline`
   * (which looks at the deadline among equals), ignored by others. Default 0.
   *
   * @generated from field: int32 priority = 5;
   */
  priority: number;

  /**
   * Whom the request is for, at most 128 characters: the fair-share queue policy divides the
   * executors among tenants, other policies ignore it. Under every policy a tenant shares no prefix
   * cache blocks with others, so that neither num_cached_tokens nor timing tells what prompts they
   * had, unless the scheduler runs with --share-prefixes-across-tenants. Requests without one share
   * a tenant. Where callers are known, their tenant takes its place, unless their credential has the
   * scope `tenants`.
   *
   * @generated from field: string tenant = 6;
   */
  tenant: string;

  /**
   * > 0: the time from its arrival within which the last token is wanted. Used by the queue policy
   * `deadline`, ignored by others. A request that cannot meet it any more and has no token yet is
   * ended early (FINISH_REASON_ERROR, DEADLINE_UNREACHABLE); one that has tokens goes on. A client
   * that submits a request again sends what is left of it. Default: none.
   *
   * @generated from field: google.protobuf.Duration deadline = 7;
   */
  deadline?: Duration | undefined;

  /**
   * Name of the LoRA adapter to use, at most 128 characters. FEATURE_UNSUPPORTED if no executor can
   * apply adapters. Which ones an executor has only itself knows: a request whose adapter is not
   * there is accepted, and ends with FINISH_REASON_ERROR, ROW_FAILED, before its first token; the
   * message has the name. Default: the model alone.
   *
   * @generated from field: string adapter = 8;
   */
  adapter: string;

  /**
   * At most 128 characters. Within a tenant, prefix cache blocks are shared only among requests with
   * the same salt, so nobody without it can find out by timing what prompts were there. Default: the
   * salt of all that give none.
   *
   * @generated from field: string cache_salt = 9;
   */
  cacheSalt: string;

  /**
   * Neither uses nor fills the prefix cache. (The sequences of the request still share its prompt.)
   *
   * @generated from field: bool bypass_prefix_cache = 10;
   */
  bypassPrefixCache: boolean;

  /**
   * Input of the encoder, for encoder-decoder models; the prompt is then what the decoder begins
   * with. FEATURE_UNSUPPORTED if the model has no encoder.
   *
   * @generated from field: repeated int32 encoder_token_ids = 11;
   */
  encoderTokenIds: number[];

  /**
   * What resume_token_ids is, of several sequences; a sequence that is not named starts from the
   * prompt. The client sends all tokens of a sequence that has ended, too: it then finishes at once
   * and gets another SequenceFinish. Refused with SAMPLING_PARAMS_INVALID: an index that is not one
   * of 0 .. n-1 or is named twice, together with resume_token_ids, with best_of > n, and with
   * beam_search.
   *
   * @generated from field: repeated splitserve.scheduler.v1.ResumedSequence resume_sequences = 12;
   */
  resumeSequences: ResumedSequence[];

  /**
   * The digest of the model that the prompt was encoded for; MODEL_CHANGED if another is served now.
   * Default: any.
   *
   * @generated from field: string model_digest = 13;
   */
  modelDigest: string;

  /**
   * So many tokens at the beginning of the prompt are no secret: a common system prompt, say. Whole
   * blocks of them are shared in the prefix cache with requests of other tenants that say the same
   * of theirs. They are named otherwise than the tenant's own: its other requests find them only if
   * they say the same, too. cache_salt and adapter keep apart as ever. Without effect beside
   * encoder_token_ids, which come before the prompt and are private. >= 0; more than the prompt has:
   * all of it.
   *
   * @generated from field: int32 num_public_prefix_tokens = 14;
   */
  numPublicPrefixTokens: number;

  /**
   * The span that this request belongs to, as the header of W3C Trace Context has it; in Generate
   * metadata of the same name will do. A scheduler that writes traces goes on with that trace: not
   * where its flag says that it is not recorded, and otherwise for so many requests a second as the
   * operator allows. What is no such header, or has more than 128 characters, is as none: a request
   * is never refused for it.
   *
   * @generated from field: string traceparent = 15;
   */
  traceparent: string;

  /**
   * What tracing systems add to traceparent, as the header has it. More than 512 characters are as
   * none.
   *
   * @generated from field: string tracestate = 16;
   */
  tracestate: string;
};

/**
 * Describes the message splitserve.scheduler.v1.GenerateRequest.
 * Use `create(GenerateRequestSchema)` to create a new message.
 */
export const GenerateRequestSchema: GenMessage<GenerateRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 0);

/**
 * Output tokens the client already has of one of several sequences.
 *
 * @generated from message splitserve.scheduler.v1.ResumedSequence
 */
export type ResumedSequence = Message<"splitserve.scheduler.v1.ResumedSequence"> & {
  /**
   * Which of the n sequences.
   *
   * @generated from field: int32 index = 1;
   */
  index: number;

  /**
   * Its output tokens.
   *
   * @generated from field: repeated int32 token_ids = 2;
   */
  tokenIds: number[];
};

/**
 * Describes the message splitserve.scheduler.v1.ResumedSequence.
 * Use `create(ResumedSequenceSchema)` to create a new message.
 */
export const ResumedSequenceSchema: GenMessage<ResumedSequence> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 1);

/**
 * How tokens are chosen and when to stop. A value outside its range is refused
 * (SAMPLING_PARAMS_INVALID), and so are constraints that leave no token to sample. executor.proto
 * gives the exact arithmetic: constraints and bias, penalties, temperature, top_k, top_p, min_p, in
 * this order, each as in `generate` of the Python package transformers where that has it. All
 * defaults are neutral, whatever the model; see GetModelResponse.default_sampling_params.
 *
 * @generated from message splitserve.scheduler.v1.SamplingParams
 */
export type SamplingParams = Message<"splitserve.scheduler.v1.SamplingParams"> & {
  /**
   * In [0, 100]; 0 is greedy. Default 1.
   *
   * @generated from field: optional float temperature = 1;
   */
  temperature?: number | undefined;

  /**
   * >= 1: only the k most probable tokens. 0 and -1: no limit, which is the default.
   *
   * @generated from field: optional int32 top_k = 2;
   */
  topK?: number | undefined;

  /**
   * In (0, 1]: the smallest set of most probable tokens with this much of the probability that
   * top_k leaves, of equals the smaller ids first. Default 1.
   *
   * @generated from field: optional float top_p = 3;
   */
  topP?: number | undefined;

  /**
   * In [0, 1]: tokens at least this probable relative to the most probable one. Default 0.
   *
   * @generated from field: optional float min_p = 4;
   */
  minP?: number | undefined;

  /**
   * In (0, 100]; over prompt and output. Default 1 (off).
   *
   * @generated from field: optional float repetition_penalty = 5;
   */
  repetitionPenalty?: number | undefined;

  /**
   * In [-2, 2]; over output. Default 0 (off).
   *
   * @generated from field: optional float presence_penalty = 6;
   */
  presencePenalty?: number | undefined;

  /**
   * In [-2, 2]; over output, times the count. Default 0 (off).
   *
   * @generated from field: optional float frequency_penalty = 7;
   */
  frequencyPenalty?: number | undefined;

  /**
   * Token id -> added to its logit, each in [-100, 100], or -inf: the token is never sampled. At
   * most 1024 entries.
   *
   * @generated from field: map<int32, float> logit_bias = 8;
   */
  logitBias: { [key: number]: number };

  /**
   * Makes sampling repeatable. Default: the server draws one. A client that may want to resume a
   * sampled stream sets it.
   *
   * @generated from field: optional int64 seed = 9;
   */
  seed?: bigint | undefined;

  /**
   * >= 1: most output tokens. Default: as many as max_model_len leaves.
   *
   * @generated from field: optional int32 max_tokens = 10;
   */
  maxTokens?: number | undefined;

  /**
   * >= 0, and at most max_tokens if that is given: before this many output tokens nothing that
   * would end the sequence can be sampled (with ignore_eos, end-of-sequence tokens do not). Default
   * 0. Stop strings, which the server does not know, are a client's to look for; ours only does in
   * the text of the tokens after these.
   *
   * @generated from field: optional int32 min_tokens = 11;
   */
  minTokens?: number | undefined;

  /**
   * Tokens that end the sequence besides the model's own end-of-sequence tokens. At most 256.
   *
   * @generated from field: repeated int32 stop_token_ids = 12;
   */
  stopTokenIds: number[];

  /**
   * Go on after an end-of-sequence token. Does not touch stop_token_ids.
   *
   * @generated from field: bool ignore_eos = 13;
   */
  ignoreEos: boolean;

  /**
   * In [0, 20]: return each output token's logprob and the top N. Default: no logprobs.
   *
   * @generated from field: optional int32 num_logprobs = 14;
   */
  numLogprobs?: number | undefined;

  /**
   * In [0, 20]: return each prompt token's logprob and the top N. Default: none. They come before
   * the first output token, so they are not sent if any token is resumed.
   *
   * @generated from field: optional int32 num_prompt_logprobs = 15;
   */
  numPromptLogprobs?: number | undefined;

  /**
   * In [1, 128], and at most GetModelResponse.max_num_sequences: the number of completions returned.
   * Default 1.
   *
   * @generated from field: optional int32 n = 16;
   */
  n?: number | undefined;

  /**
   * In [n, 128], and at most GetModelResponse.max_num_sequences: so many completions are computed side by side, and the n with the highest mean
   * logprob per token (a stop token counts) are returned, the best first, of equals the earlier;
   * nothing is sent before the end. With best_of = n there is nothing to choose: it is n alone.
   * Default: n.
   *
   * @generated from field: optional int32 best_of = 17;
   */
  bestOf?: number | undefined;

  /**
   * Beam search instead of sampling. What shapes the distribution must then have its default
   * (top_k, top_p, min_p, the penalties, logit_bias, allowed_token_ids, bad_words_token_ids;
   * temperature is 1 or 0, and does nothing), and best_of, num_logprobs and num_prompt_logprobs are
   * not available. seed does nothing.
   *
   * @generated from field: splitserve.scheduler.v1.BeamSearch beam_search = 18;
   */
  beamSearch?: BeamSearch | undefined;

  /**
   * Only these tokens can be sampled; at most 16384. Default: all. Those that end a sequence are no
   * exception: if none is here, it ends by its length, or by a stop_token_id that is here.
   *
   * @generated from field: repeated int32 allowed_token_ids = 19;
   */
  allowedTokenIds: number[];

  /**
   * Sequences of tokens that must not be completed, at most 1024, with at most 8192 tokens together.
   * The last token of one cannot be sampled while those before it are the last tokens of prompt and
   * output; a single token never can. One that is a single token which ends the output has no
   * effect: that takes ignore_eos, or a logit_bias of -inf.
   *
   * @generated from field: repeated splitserve.scheduler.v1.TokenSequence bad_words_token_ids = 20;
   */
  badWordsTokenIds: TokenSequence[];

  /**
   * What the text of the output must be. Default: anything.
   *
   * @generated from field: splitserve.scheduler.v1.Grammar grammar = 21;
   */
  grammar?: Grammar | undefined;
};

/**
 * Describes the message splitserve.scheduler.v1.SamplingParams.
 * Use `create(SamplingParamsSchema)` to create a new message.
 */
export const SamplingParamsSchema: GenMessage<SamplingParams> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 2);

/**
 * Some tokens in order.
 *
 * @generated from message splitserve.scheduler.v1.TokenSequence
 */
export type TokenSequence = Message<"splitserve.scheduler.v1.TokenSequence"> & {
  /**
   * At least one.
   *
   * @generated from field: repeated int32 token_ids = 1;
   */
  tokenIds: number[];
};

/**
 * Describes the message splitserve.scheduler.v1.TokenSequence.
 * Use `create(TokenSequenceSchema)` to create a new message.
 */
export const TokenSequenceSchema: GenMessage<TokenSequence> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 3);

/**
 * What the text of a sequence's output must be. Each token that is sampled continues it, and an
 * end-of-sequence token of the model is sampled only where the text is complete; where nothing can
 * follow, it must be. Special tokens are no text and are never sampled. A sequence that ends
 * otherwise, by its length or by a token of stop_token_ids, may end in the middle of the text.
 * Resumed tokens are the beginning of it.
 *
 * Exactly one kind is given, with 1 to 65536 bytes of UTF-8 (of choices: together), and none of its
 * texts is empty. Refused with SAMPLING_PARAMS_INVALID: together with beam_search, ignore_eos or
 * min_tokens > 0, and for a model without end-of-sequence tokens; FEATURE_UNSUPPORTED if no executor
 * applies grammars. Everything else may come with it; a request whose constraints together leave no
 * token ends with INVALID_LOGITS. Whether a grammar can be compiled is known to executors alone: one
 * that cannot is accepted, and ends with GRAMMAR_INVALID before its first token.
 *
 * @generated from message splitserve.scheduler.v1.Grammar
 */
export type Grammar = Message<"splitserve.scheduler.v1.Grammar"> & {
  /**
   * What language the grammar is in.
   *
   * @generated from oneof splitserve.scheduler.v1.Grammar.kind
   */
  kind: {
    /**
     * A JSON Schema, as JSON. The text is a JSON value that is valid for it. `{"type": "object"}` is
     * any JSON object. Between the tokens of JSON there may be one space, or a line break and up to
     * 32 spaces or tabs.
     *
     * @generated from field: string json_schema = 1;
     */
    value: string;
    case: "jsonSchema";
  } | {
    /**
     * A regular expression, of which the whole text is a match: the syntax of the Rust crate regex.
     * Anchors stand at its ends only, where they mean nothing.
     *
     * @generated from field: string regex = 2;
     */
    value: string;
    case: "regex";
  } | {
    /**
     * A context-free grammar in the dialect of Lark that the library llguidance reads.
     *
     * @generated from field: string lark = 3;
     */
    value: string;
    case: "lark";
  } | {
    /**
     * Some texts. The text is one of them.
     *
     * @generated from field: splitserve.scheduler.v1.Choices choices = 4;
     */
    value: Choices;
    case: "choices";
  } | { case: undefined; value?: undefined };
};

/**
 * Describes the message splitserve.scheduler.v1.Grammar.
 * Use `create(GrammarSchema)` to create a new message.
 */
export const GrammarSchema: GenMessage<Grammar> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 4);

/**
 * Texts to choose from.
 *
 * @generated from message splitserve.scheduler.v1.Choices
 */
export type Choices = Message<"splitserve.scheduler.v1.Choices"> & {
  /**
   * 1 to 1024 of them.
   *
   * @generated from field: repeated string texts = 1;
   */
  texts: string[];
};

/**
 * Describes the message splitserve.scheduler.v1.Choices.
 * Use `create(ChoicesSchema)` to create a new message.
 */
export const ChoicesSchema: GenMessage<Choices> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 5);

/**
 * Beam search: the n hypotheses with the highest score are returned, the best first. The score is
 * the sum of the tokens' logprobs / (number of output tokens ^ length_penalty), a stop token
 * included in both.
 *
 * A step ranks all continuations of the hypotheses that are followed by the sum of their logprobs; of
 * equals the one of the earlier hypothesis comes first, then the smaller token. Among the first
 * `width`, those that end with a stop token or by length are finished. The first `width` of those that
 * do not end are followed on. (So `width` tokens of a hypothesis, and as many more as there are tokens
 * that end it, are all that can matter.) Before min_tokens, tokens that would end it are left out.
 *
 * @generated from message splitserve.scheduler.v1.BeamSearch
 */
export type BeamSearch = Message<"splitserve.scheduler.v1.BeamSearch"> & {
  /**
   * In [1, 16], at least n and at most GetModelResponse.max_num_sequences; required. Hypotheses that
   * are followed at a time.
   *
   * @generated from field: optional int32 width = 1;
   */
  width?: number | undefined;

  /**
   * In [-10, 10]; above 0 favours long completions. Default 1.
   *
   * @generated from field: optional float length_penalty = 2;
   */
  lengthPenalty?: number | undefined;

  /**
   * When to stop looking for better ones.
   *
   * @generated from field: splitserve.scheduler.v1.BeamEarlyStopping early_stopping = 3;
   */
  earlyStopping: BeamEarlyStopping;
};

/**
 * Describes the message splitserve.scheduler.v1.BeamSearch.
 * Use `create(BeamSearchSchema)` to create a new message.
 */
export const BeamSearchSchema: GenMessage<BeamSearch> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 6);

/**
 * One message of a Generate stream.
 *
 * @generated from message splitserve.scheduler.v1.GenerateResponse
 */
export type GenerateResponse = Message<"splitserve.scheduler.v1.GenerateResponse"> & {
  /**
   * The id of the request; useful where the server drew it.
   *
   * @generated from field: string request_id = 1;
   */
  requestId: string;

  /**
   * What happened.
   *
   * @generated from oneof splitserve.scheduler.v1.GenerateResponse.event
   */
  event: {
    /**
     * New tokens.
     *
     * @generated from field: splitserve.scheduler.v1.TokenChunk tokens = 2;
     */
    value: TokenChunk;
    case: "tokens";
  } | {
    /**
     * The end; the last message.
     *
     * @generated from field: splitserve.scheduler.v1.Finish finish = 3;
     */
    value: Finish;
    case: "finish";
  } | {
    /**
     * The end of one of several sequences.
     *
     * @generated from field: splitserve.scheduler.v1.SequenceFinish sequence_finish = 4;
     */
    value: SequenceFinish;
    case: "sequenceFinish";
  } | { case: undefined; value?: undefined };
};

/**
 * Describes the message splitserve.scheduler.v1.GenerateResponse.
 * Use `create(GenerateResponseSchema)` to create a new message.
 */
export const GenerateResponseSchema: GenMessage<GenerateResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 7);

/**
 * New output tokens of one sequence, in order. A stop token is included.
 *
 * @generated from message splitserve.scheduler.v1.TokenChunk
 */
export type TokenChunk = Message<"splitserve.scheduler.v1.TokenChunk"> & {
  /**
   * At least one, except in a chunk that only brings prompt_logprobs.
   *
   * @generated from field: repeated int32 token_ids = 1;
   */
  tokenIds: number[];

  /**
   * Parallel to token_ids if num_logprobs was given; otherwise empty.
   *
   * @generated from field: repeated splitserve.scheduler.v1.TokenLogprob logprobs = 2;
   */
  logprobs: TokenLogprob[];

  /**
   * Before or with the first output token, if num_prompt_logprobs was given: one for every prompt
   * token but the first, in order, over as many chunks as the prompt took. Of several sequences
   * only the chunks of index 0 bring them.
   *
   * @generated from field: repeated splitserve.scheduler.v1.TokenLogprob prompt_logprobs = 3;
   */
  promptLogprobs: TokenLogprob[];

  /**
   * Which of the sequences; 0 if there is one.
   *
   * @generated from field: int32 index = 4;
   */
  index: number;
};

/**
 * Describes the message splitserve.scheduler.v1.TokenChunk.
 * Use `create(TokenChunkSchema)` to create a new message.
 */
export const TokenChunkSchema: GenMessage<TokenChunk> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 8);

/**
 * The score of a token: natural logarithm of the softmax of the raw logits, before all that
 * SamplingParams ask for.
 *
 * @generated from message splitserve.scheduler.v1.TokenLogprob
 */
export type TokenLogprob = Message<"splitserve.scheduler.v1.TokenLogprob"> & {
  /**
   * The token.
   *
   * @generated from field: int32 token_id = 1;
   */
  tokenId: number;

  /**
   * Its logprob.
   *
   * @generated from field: float logprob = 2;
   */
  logprob: number;

  /**
   * 1 is the most probable.
   *
   * @generated from field: int32 rank = 3;
   */
  rank: number;

  /**
   * The N most probable tokens, best first.
   *
   * @generated from field: repeated splitserve.scheduler.v1.TopLogprob top = 4;
   */
  top: TopLogprob[];
};

/**
 * Describes the message splitserve.scheduler.v1.TokenLogprob.
 * Use `create(TokenLogprobSchema)` to create a new message.
 */
export const TokenLogprobSchema: GenMessage<TokenLogprob> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 9);

/**
 * One alternative.
 *
 * @generated from message splitserve.scheduler.v1.TopLogprob
 */
export type TopLogprob = Message<"splitserve.scheduler.v1.TopLogprob"> & {
  /**
   * The token.
   *
   * @generated from field: int32 token_id = 1;
   */
  tokenId: number;

  /**
   * Its logprob.
   *
   * @generated from field: float logprob = 2;
   */
  logprob: number;
};

/**
 * Describes the message splitserve.scheduler.v1.TopLogprob.
 * Use `create(TopLogprobSchema)` to create a new message.
 */
export const TopLogprobSchema: GenMessage<TopLogprob> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 10);

/**
 * The end of one of several sequences of a request.
 *
 * @generated from message splitserve.scheduler.v1.SequenceFinish
 */
export type SequenceFinish = Message<"splitserve.scheduler.v1.SequenceFinish"> & {
  /**
   * Which of the n sequences.
   *
   * @generated from field: int32 index = 1;
   */
  index: number;

  /**
   * STOP, LENGTH or MODEL_LENGTH.
   *
   * @generated from field: splitserve.scheduler.v1.FinishReason reason = 2;
   */
  reason: FinishReason;

  /**
   * The token that ended it, with FINISH_REASON_STOP.
   *
   * @generated from field: optional int32 stop_token_id = 3;
   */
  stopTokenId?: number | undefined;

  /**
   * Its output tokens, resumed ones included.
   *
   * @generated from field: int32 num_output_tokens = 4;
   */
  numOutputTokens: number;

  /**
   * With best_of > n and beam_search: the sum of its tokens' logprobs.
   *
   * @generated from field: optional float cumulative_logprob = 5;
   */
  cumulativeLogprob?: number | undefined;

  /**
   * With beam_search: its score, see BeamSearch.
   *
   * @generated from field: optional float score = 6;
   */
  score?: number | undefined;
};

/**
 * Describes the message splitserve.scheduler.v1.SequenceFinish.
 * Use `create(SequenceFinishSchema)` to create a new message.
 */
export const SequenceFinishSchema: GenMessage<SequenceFinish> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 11);

/**
 * The end of a request.
 *
 * @generated from message splitserve.scheduler.v1.Finish
 */
export type Finish = Message<"splitserve.scheduler.v1.Finish"> & {
  /**
   * Why; of several sequences, why sequence 0 ended, unless it is ABORTED or ERROR.
   *
   * @generated from field: splitserve.scheduler.v1.FinishReason reason = 1;
   */
  reason: FinishReason;

  /**
   * The token that ended it, or sequence 0, with FINISH_REASON_STOP.
   *
   * @generated from field: optional int32 stop_token_id = 2;
   */
  stopTokenId?: number | undefined;

  /**
   * What it took.
   *
   * @generated from field: splitserve.scheduler.v1.Usage usage = 3;
   */
  usage?: Usage | undefined;

  /**
   * With FINISH_REASON_ERROR: what failed.
   *
   * @generated from field: splitserve.scheduler.v1.RequestError error = 4;
   */
  error?: RequestError | undefined;
};

/**
 * Describes the message splitserve.scheduler.v1.Finish.
 * Use `create(FinishSchema)` to create a new message.
 */
export const FinishSchema: GenMessage<Finish> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 12);

/**
 * Token counts of a request, as this server saw it: a resumed request starts anew.
 *
 * @generated from message splitserve.scheduler.v1.Usage
 */
export type Usage = Message<"splitserve.scheduler.v1.Usage"> & {
  /**
   * Prompt tokens.
   *
   * @generated from field: int32 num_prompt_tokens = 1;
   */
  numPromptTokens: number;

  /**
   * Output tokens of all sequences returned, resumed ones included.
   *
   * @generated from field: int32 num_output_tokens = 2;
   */
  numOutputTokens: number;

  /**
   * Prompt tokens whose KV came from the prefix cache when it was first scheduled: from requests of
   * the same tenant, see GenerateRequest.tenant. Blocks that its own sequences share are no part of
   * it.
   *
   * @generated from field: int32 num_cached_tokens = 3;
   */
  numCachedTokens: number;

  /**
   * How often it was preempted.
   *
   * @generated from field: int32 num_preemptions = 4;
   */
  numPreemptions: number;
};

/**
 * Describes the message splitserve.scheduler.v1.Usage.
 * Use `create(UsageSchema)` to create a new message.
 */
export const UsageSchema: GenMessage<Usage> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 13);

/**
 * An error in-band.
 *
 * @generated from message splitserve.scheduler.v1.RequestError
 */
export type RequestError = Message<"splitserve.scheduler.v1.RequestError"> & {
  /**
   * A reason of the tables above.
   *
   * @generated from field: string reason = 1;
   */
  reason: string;

  /**
   * For people.
   *
   * @generated from field: string message = 2;
   */
  message: string;

  /**
   * With QUEUE_FULL and QUOTA_EXCEEDED: when to try again.
   *
   * @generated from field: google.protobuf.Duration retry_delay = 3;
   */
  retryDelay?: Duration | undefined;

  /**
   * With DRAINING: addresses (host:port) of other schedulers that may take it; see "Draining".
   *
   * @generated from field: repeated string schedulers = 4;
   */
  schedulers: string[];
};

/**
 * Describes the message splitserve.scheduler.v1.RequestError.
 * Use `create(RequestErrorSchema)` to create a new message.
 */
export const RequestErrorSchema: GenMessage<RequestError> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 14);

/**
 * A client's message in a Session. It has an action, or submissions, or both.
 *
 * @generated from message splitserve.scheduler.v1.SessionRequest
 */
export type SessionRequest = Message<"splitserve.scheduler.v1.SessionRequest"> & {
  /**
   * What to do first.
   *
   * @generated from oneof splitserve.scheduler.v1.SessionRequest.action
   */
  action: {
    /**
     * Submits a request.
     *
     * @generated from field: splitserve.scheduler.v1.SessionSubmit submit = 1;
     */
    value: SessionSubmit;
    case: "submit";
  } | {
    /**
     * Aborts one of this session's requests; an unknown or finished handle is ignored.
     *
     * @generated from field: splitserve.scheduler.v1.SessionAbort abort = 2;
     */
    value: SessionAbort;
    case: "abort";
  } | { case: undefined; value?: undefined };

  /**
   * Requests to submit after that, in order: a busy server reads messages one at a time, so many
   * requests in one message begin sooner. Only over a stream that `takes_submissions`.
   *
   * @generated from field: repeated splitserve.scheduler.v1.SessionSubmit submissions = 3;
   */
  submissions: SessionSubmit[];
};

/**
 * Describes the message splitserve.scheduler.v1.SessionRequest.
 * Use `create(SessionRequestSchema)` to create a new message.
 */
export const SessionRequestSchema: GenMessage<SessionRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 15);

/**
 * Submits a request in a Session.
 *
 * @generated from message splitserve.scheduler.v1.SessionSubmit
 */
export type SessionSubmit = Message<"splitserve.scheduler.v1.SessionSubmit"> & {
  /**
   * Names the request in this session's messages, chosen by the client; unique among its unfinished
   * requests.
   *
   * @generated from field: int32 handle = 1;
   */
  handle: number;

  /**
   * The request.
   *
   * @generated from field: splitserve.scheduler.v1.GenerateRequest request = 2;
   */
  request?: GenerateRequest | undefined;

  /**
   * Of whom the request is, see Callers. Default: of who opened the Session. Only who has the scope
   * `gateway` may give one (CALLER_NOT_ALLOWED), and has to.
   *
   * @generated from field: string credential = 3;
   */
  credential: string;
};

/**
 * Describes the message splitserve.scheduler.v1.SessionSubmit.
 * Use `create(SessionSubmitSchema)` to create a new message.
 */
export const SessionSubmitSchema: GenMessage<SessionSubmit> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 16);

/**
 * Aborts a request in a Session.
 *
 * @generated from message splitserve.scheduler.v1.SessionAbort
 */
export type SessionAbort = Message<"splitserve.scheduler.v1.SessionAbort"> & {
  /**
   * The request.
   *
   * @generated from field: int32 handle = 1;
   */
  handle: number;
};

/**
 * Describes the message splitserve.scheduler.v1.SessionAbort.
 * Use `create(SessionAbortSchema)` to create a new message.
 */
export const SessionAbortSchema: GenMessage<SessionAbort> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 17);

/**
 * What a step brought to a Session's requests, or several steps: a stream that is slower than they
 * are gets what they brought in one message.
 *
 * @generated from message splitserve.scheduler.v1.SessionResponse
 */
export type SessionResponse = Message<"splitserve.scheduler.v1.SessionResponse"> & {
  /**
   * Plain tokens: request `handles[i]` got the token `token_ids[i]`. A request that asked for
   * logprobs, or has several sequences, gets its tokens as events instead. A handle may be there
   * several times; its tokens are in order.
   *
   * @generated from field: repeated int32 handles = 1;
   */
  handles: number[];

  /**
   * Parallel to handles.
   *
   * @generated from field: repeated int32 token_ids = 2;
   */
  tokenIds: number[];

  /**
   * Everything else, after the tokens.
   *
   * @generated from field: repeated splitserve.scheduler.v1.SessionEvent events = 3;
   */
  events: SessionEvent[];

  /**
   * Whether this stream takes `SessionRequest.submissions`. One message says it for the rest of the
   * stream; servers of earlier versions never do.
   *
   * @generated from field: bool takes_submissions = 4;
   */
  takesSubmissions: boolean;
};

/**
 * Describes the message splitserve.scheduler.v1.SessionResponse.
 * Use `create(SessionResponseSchema)` to create a new message.
 */
export const SessionResponseSchema: GenMessage<SessionResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 18);

/**
 * Something about one request of a Session.
 *
 * @generated from message splitserve.scheduler.v1.SessionEvent
 */
export type SessionEvent = Message<"splitserve.scheduler.v1.SessionEvent"> & {
  /**
   * The request.
   *
   * @generated from field: int32 handle = 1;
   */
  handle: number;

  /**
   * What happened.
   *
   * @generated from oneof splitserve.scheduler.v1.SessionEvent.event
   */
  event: {
    /**
     * Tokens with logprobs, or of one of several sequences.
     *
     * @generated from field: splitserve.scheduler.v1.TokenChunk tokens = 2;
     */
    value: TokenChunk;
    case: "tokens";
  } | {
    /**
     * The end of an accepted request; the handle is free again.
     *
     * @generated from field: splitserve.scheduler.v1.Finish finish = 3;
     */
    value: Finish;
    case: "finish";
  } | {
    /**
     * The request was not accepted; the handle is free again.
     *
     * @generated from field: splitserve.scheduler.v1.RequestError rejected = 4;
     */
    value: RequestError;
    case: "rejected";
  } | {
    /**
     * The end of one of several sequences.
     *
     * @generated from field: splitserve.scheduler.v1.SequenceFinish sequence_finish = 5;
     */
    value: SequenceFinish;
    case: "sequenceFinish";
  } | { case: undefined; value?: undefined };
};

/**
 * Describes the message splitserve.scheduler.v1.SessionEvent.
 * Use `create(SessionEventSchema)` to create a new message.
 */
export const SessionEventSchema: GenMessage<SessionEvent> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 19);

/**
 * Which request to abort.
 *
 * @generated from message splitserve.scheduler.v1.AbortRequest
 */
export type AbortRequest = Message<"splitserve.scheduler.v1.AbortRequest"> & {
  /**
   * Its id.
   *
   * @generated from field: string request_id = 1;
   */
  requestId: string;
};

/**
 * Describes the message splitserve.scheduler.v1.AbortRequest.
 * Use `create(AbortRequestSchema)` to create a new message.
 */
export const AbortRequestSchema: GenMessage<AbortRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 20);

/**
 * The request will get its Finish.
 *
 * @generated from message splitserve.scheduler.v1.AbortResponse
 */
export type AbortResponse = Message<"splitserve.scheduler.v1.AbortResponse"> & {
};

/**
 * Describes the message splitserve.scheduler.v1.AbortResponse.
 * Use `create(AbortResponseSchema)` to create a new message.
 */
export const AbortResponseSchema: GenMessage<AbortResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 21);

/**
 * Asks for the model.
 *
 * @generated from message splitserve.scheduler.v1.GetModelRequest
 */
export type GetModelRequest = Message<"splitserve.scheduler.v1.GetModelRequest"> & {
};

/**
 * Describes the message splitserve.scheduler.v1.GetModelRequest.
 * Use `create(GetModelRequestSchema)` to create a new message.
 */
export const GetModelRequestSchema: GenMessage<GetModelRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 22);

/**
 * The model as far as a client needs it.
 *
 * @generated from message splitserve.scheduler.v1.GetModelResponse
 */
export type GetModelResponse = Message<"splitserve.scheduler.v1.GetModelResponse"> & {
  /**
   * Its name.
   *
   * @generated from field: string name = 1;
   */
  name: string;

  /**
   * Lower-case hex SHA-256 of configuration and weights.
   *
   * @generated from field: string digest = 2;
   */
  digest: string;

  /**
   * Data type of weights and activations.
   *
   * @generated from field: string dtype = 3;
   */
  dtype: string;

  /**
   * Token ids are 0 .. vocab_size-1.
   *
   * @generated from field: int32 vocab_size = 4;
   */
  vocabSize: number;

  /**
   * Most tokens of prompt and output together, of a request with one sequence; see Lengths. It may
   * change when executors come and go.
   *
   * @generated from field: int32 max_model_len_tokens = 5;
   */
  maxModelLenTokens: number;

  /**
   * Tokens that end a sequence unless `ignore_eos`.
   *
   * @generated from field: repeated int32 eos_token_ids = 6;
   */
  eosTokenIds: number[];

  /**
   * Most sequences of a request: of n, best_of and beam_search.width. It may change when executors
   * come and go.
   *
   * @generated from field: int32 max_num_sequences = 7;
   */
  maxNumSequences: number;

  /**
   * Most bytes of a client's message; see Sizes. It may change when executors come and go.
   *
   * @generated from field: int64 max_message_bytes = 9;
   */
  maxMessageBytes: bigint;

  /**
   * What the model's authors recommend (its generation_config.json). Only temperature, top_k,
   * top_p, min_p and repetition_penalty can be set. The server itself uses none of them: a client
   * that wants them puts them into its requests.
   *
   * @generated from field: splitserve.scheduler.v1.SamplingParams default_sampling_params = 10;
   */
  defaultSamplingParams?: SamplingParams | undefined;

  /**
   * Whether requests are served now, and if not, why. Health (grpc.health.v1), which anybody may
   * ask, is SERVING exactly if this is READINESS_READY, and says no more. Before the first executor
   * has registered GetModel answers MODEL_NOT_READY. Earlier schedulers leave it unspecified.
   *
   * @generated from field: splitserve.scheduler.v1.Readiness readiness = 11;
   */
  readiness: Readiness;
};

/**
 * Describes the message splitserve.scheduler.v1.GetModelResponse.
 * Use `create(GetModelResponseSchema)` to create a new message.
 */
export const GetModelResponseSchema: GenMessage<GetModelResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 23);

/**
 * Asks whose credential it is.
 *
 * @generated from message splitserve.scheduler.v1.IdentifyRequest
 */
export type IdentifyRequest = Message<"splitserve.scheduler.v1.IdentifyRequest"> & {
  /**
   * An API key or a JWT, without `Bearer`; at most 8192 characters.
   *
   * @generated from field: string credential = 1;
   */
  credential: string;
};

/**
 * Describes the message splitserve.scheduler.v1.IdentifyRequest.
 * Use `create(IdentifyRequestSchema)` to create a new message.
 */
export const IdentifyRequestSchema: GenMessage<IdentifyRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 24);

/**
 * Whose it is.
 *
 * @generated from message splitserve.scheduler.v1.IdentifyResponse
 */
export type IdentifyResponse = Message<"splitserve.scheduler.v1.IdentifyResponse"> & {
  /**
   * Whether callers have to be known here. If not, any credential is taken, and none is needed.
   *
   * @generated from field: bool knows_callers = 1;
   */
  knowsCallers: boolean;

  /**
   * What the credential is called where calls are recorded: `key:` with the id of an API key, or
   * `token:` with the subject of a JWT.
   *
   * @generated from field: string caller = 2;
   */
  caller: string;

  /**
   * Its tenant.
   *
   * @generated from field: string tenant = 3;
   */
  tenant: string;

  /**
   * What it may do: `generate`, `gateway`, `tenants`, `operator`.
   *
   * @generated from field: repeated string scopes = 4;
   */
  scopes: string[];

  /**
   * Whether its tenant may use the model that is served now.
   *
   * @generated from field: bool may_use_model = 5;
   */
  mayUseModel: boolean;
};

/**
 * Describes the message splitserve.scheduler.v1.IdentifyResponse.
 * Use `create(IdentifyResponseSchema)` to create a new message.
 */
export const IdentifyResponseSchema: GenMessage<IdentifyResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 25);

/**
 * Asks for the tokenizer files.
 *
 * @generated from message splitserve.scheduler.v1.GetTokenizerRequest
 */
export type GetTokenizerRequest = Message<"splitserve.scheduler.v1.GetTokenizerRequest"> & {
};

/**
 * Describes the message splitserve.scheduler.v1.GetTokenizerRequest.
 * Use `create(GetTokenizerRequestSchema)` to create a new message.
 */
export const GetTokenizerRequestSchema: GenMessage<GetTokenizerRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 26);

/**
 * One piece of one tokenizer file.
 *
 * @generated from message splitserve.scheduler.v1.GetTokenizerResponse
 */
export type GetTokenizerResponse = Message<"splitserve.scheduler.v1.GetTokenizerResponse"> & {
  /**
   * As the executor names it: `tokenizer.json`, `additional_chat_templates/rag.jinja`.
   *
   * @generated from field: string file_name = 1;
   */
  fileName: string;

  /**
   * The next bytes of that file, at most 1 MiB.
   *
   * @generated from field: bytes data = 2;
   */
  data: Uint8Array;
};

/**
 * Describes the message splitserve.scheduler.v1.GetTokenizerResponse.
 * Use `create(GetTokenizerResponseSchema)` to create a new message.
 */
export const GetTokenizerResponseSchema: GenMessage<GetTokenizerResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_scheduler_v1_scheduler, 27);

/**
 * When a beam search that has `width` finished hypotheses ends.
 *
 * @generated from enum splitserve.scheduler.v1.BeamEarlyStopping
 */
export enum BeamEarlyStopping {
  /**
   * HEURISTIC.
   *
   * @generated from enum value: BEAM_EARLY_STOPPING_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * When the best unfinished hypothesis, at its present length, scores below all of them.
   *
   * @generated from enum value: BEAM_EARLY_STOPPING_HEURISTIC = 1;
   */
  HEURISTIC = 1,

  /**
   * At once.
   *
   * @generated from enum value: BEAM_EARLY_STOPPING_ALWAYS = 2;
   */
  ALWAYS = 2,

  /**
   * When no unfinished hypothesis could come to score above the worst of them, at any length.
   *
   * @generated from enum value: BEAM_EARLY_STOPPING_NEVER = 3;
   */
  NEVER = 3,
}

/**
 * Describes the enum splitserve.scheduler.v1.BeamEarlyStopping.
 */
export const BeamEarlyStoppingSchema: GenEnum<BeamEarlyStopping> = /*@__PURE__*/
  enumDesc(file_splitserve_scheduler_v1_scheduler, 0);

/**
 * Why a request, or one of its sequences, ended.
 *
 * @generated from enum splitserve.scheduler.v1.FinishReason
 */
export enum FinishReason {
  /**
   * Never sent.
   *
   * @generated from enum value: FINISH_REASON_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * An end-of-sequence or stop token; see stop_token_id.
   *
   * @generated from enum value: FINISH_REASON_STOP = 1;
   */
  STOP = 1,

  /**
   * max_tokens reached.
   *
   * @generated from enum value: FINISH_REASON_LENGTH = 2;
   */
  LENGTH = 2,

  /**
   * max_model_len reached.
   *
   * @generated from enum value: FINISH_REASON_MODEL_LENGTH = 3;
   */
  MODEL_LENGTH = 3,

  /**
   * Aborted by Abort or by its session.
   *
   * @generated from enum value: FINISH_REASON_ABORTED = 4;
   */
  ABORTED = 4,

  /**
   * This request failed alone; see `error`.
   *
   * @generated from enum value: FINISH_REASON_ERROR = 5;
   */
  ERROR = 5,
}

/**
 * Describes the enum splitserve.scheduler.v1.FinishReason.
 */
export const FinishReasonSchema: GenEnum<FinishReason> = /*@__PURE__*/
  enumDesc(file_splitserve_scheduler_v1_scheduler, 1);

/**
 * Whether a scheduler serves. Requests are taken as long as it is not DRAINING; unless it is READY
 * another scheduler serves them sooner.
 *
 * @generated from enum splitserve.scheduler.v1.Readiness
 */
export enum Readiness {
  /**
   * Not said.
   *
   * @generated from enum value: READINESS_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * An executor is connected, and steps are answered where there is work.
   *
   * @generated from enum value: READINESS_READY = 1;
   */
  READY = 1,

  /**
   * No executor is connected: requests wait for one.
   *
   * @generated from enum value: READINESS_NO_EXECUTOR = 2;
   */
  NO_EXECUTOR = 2,

  /**
   * There are requests, and no executor has answered a step for longer than one may take.
   *
   * @generated from enum value: READINESS_NO_PROGRESS = 3;
   */
  NO_PROGRESS = 3,

  /**
   * The scheduler is shutting down.
   *
   * @generated from enum value: READINESS_DRAINING = 4;
   */
  DRAINING = 4,

  /**
   * Executors are connected, and the steps or rows of every one of them fail: requests wait until
   * one is right again, or end with the error of their step or row.
   *
   * @generated from enum value: READINESS_EXECUTORS_FAILING = 5;
   */
  EXECUTORS_FAILING = 5,
}

/**
 * Describes the enum splitserve.scheduler.v1.Readiness.
 */
export const ReadinessSchema: GenEnum<Readiness> = /*@__PURE__*/
  enumDesc(file_splitserve_scheduler_v1_scheduler, 2);

/**
 * The service a scheduler offers to clients.
 *
 * @generated from service splitserve.scheduler.v1.SchedulerService
 */
export const SchedulerService: GenService<{
  /**
   * Generates one completion, or several of one prompt, and streams the tokens.
   *
   * Effect: the request waits, runs and streams until it finishes; the last message is a Finish and
   * the stream then ends with OK. It survives the loss of executors: the stream only pauses.
   * Cancelling the call, or its gRPC deadline passing, aborts the request; its blocks are free as
   * soon as the steps in flight are answered.
   * Idempotency: none; the same call twice generates twice.
   * Ordering: the tokens of a sequence arrive in order, each exactly once.
   * Errors: before the first message all of the table above; afterwards UNAVAILABLE (DRAINING),
   * RESOURCE_EXHAUSTED (STREAM_NOT_READ) and INTERNAL only. To continue a broken stream, call again
   * (here or at another scheduler of the same model) with the same `seed` and the tokens received:
   * in `resume_token_ids`, or of several sequences in `resume_sequences`. With best_of > n or
   * beam_search there is nothing to continue: the same call starts over, and with the same seed
   * gives the same.
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.Generate
   */
  generate: {
    methodKind: "server_streaming";
    input: typeof GenerateRequestSchema;
    output: typeof GenerateResponseSchema;
  },
  /**
   * Multiplexes many requests over one stream; this is what a gateway uses.
   *
   * Effect: the client submits and aborts requests at any time; the server sends one message per
   * step of an executor, with the tokens of all of this session's requests in it, and none for a
   * step that brought them nothing. When the client half-closes, the server ends the stream once
   * every request has finished. When the stream ends in any other way, all unfinished requests of
   * the session are aborted.
   * Ordering: per request as in Generate; `tokens` of a message come before its `events`.
   * Errors: what concerns one request arrives as an event and leaves the others alone. The stream
   * itself ends with INVALID_ARGUMENT (SESSION_PROTOCOL) if a message asks for nothing or reuses
   * the handle of an unfinished request, with MESSAGE_UNDECODABLE, MESSAGE_TOO_LARGE and
   * STREAM_NOT_READ as above, and with UNAVAILABLE (DRAINING) at shutdown, if a request is
   * unfinished then; a request submitted during the shutdown is rejected by an event.
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.Session
   */
  session: {
    methodKind: "bidi_streaming";
    input: typeof SessionRequestSchema;
    output: typeof SessionResponseSchema;
  },
  /**
   * Aborts an unfinished request by its id, whichever stream or client of the caller's tenant it
   * belongs to; that stream then gets a Finish with FINISH_REASON_ABORTED.
   * Idempotency: the second call finds nothing. Errors: NOT_FOUND (REQUEST_UNKNOWN).
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.Abort
   */
  abort: {
    methodKind: "unary";
    input: typeof AbortRequestSchema;
    output: typeof AbortResponseSchema;
  },
  /**
   * Says which model is served. No effect. Errors: FAILED_PRECONDITION (MODEL_NOT_READY) until the
   * first executor has registered.
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.GetModel
   */
  getModel: {
    methodKind: "unary";
    input: typeof GetModelRequestSchema;
    output: typeof GetModelResponseSchema;
  },
  /**
   * Says whose credential this is, for a gateway that does other work for its caller. No effect,
   * and nothing is counted against a quota. Errors: CALLER_UNKNOWN if it is not valid.
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.Identify
   */
  identify: {
    methodKind: "unary";
    input: typeof IdentifyRequestSchema;
    output: typeof IdentifyResponseSchema;
  },
  /**
   * Streams the tokenizer files. The chunks of one file are consecutive and in order. No effect.
   * Errors: MODEL_NOT_READY; NOT_FOUND (TOKENIZER_UNAVAILABLE).
   *
   * @generated from rpc splitserve.scheduler.v1.SchedulerService.GetTokenizer
   */
  getTokenizer: {
    methodKind: "server_streaming";
    input: typeof GetTokenizerRequestSchema;
    output: typeof GetTokenizerResponseSchema;
  },
}> = /*@__PURE__*/
  serviceDesc(file_splitserve_scheduler_v1_scheduler, 0);

