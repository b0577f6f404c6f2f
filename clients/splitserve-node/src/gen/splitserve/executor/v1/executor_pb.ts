// The step contract between a scheduler (decides) and an executor (computes).
//
// This file is the whole specification: an executor can be written from it alone.
// Contract version: 1.5 (see ContractVersion); what 1.0 does not have says "Since 1.1", and so on.
//
// # Life of an executor
//
// 1. It loads its model, allocates a device pool and a host pool of KV blocks, draws an
//    `executor_epoch` and serves ExecutorService on some address.
// 2. It calls `splitserve.scheduler.v1.RegistryService.Register` at the scheduler's address with
//    its ExecutorInfo. A refusal names the field that does not fit.
// 3. The scheduler dials the address and asks `GetInfo`; it believes nothing of what was registered
//    before the answer has said the same. It calls `GetTokenizer` if it has no tokenizer yet, and
//    opens one `Execute` stream. That stream is the liveness signal in both directions; it
//    may stay without a batch for as long as there is nothing to do. While nothing comes over it the
//    scheduler asks GetInfo once a second.
// 4. While no `Execute` stream is open, the executor calls `Register` again every second or so
//    (with a jitter); registering twice is harmless. It never exits because a scheduler went away.
// 5. Told to end, it registers no more and calls `RegistryService.Leave`; the scheduler lets what
//    runs there end, or moves it, and closes the stream. If that takes too long for the executor, it
//    answers what it has received, ends the stream with UNAVAILABLE, and is gone.
//
// # Words
//
// A *block* holds the keys and values of `block_size` consecutive tokens, for all layers. Device
// blocks are numbered 0 .. num_device_blocks-1, host blocks 0 .. num_host_blocks-1: two separate
// number spaces. A *row* is one sequence as the executor sees it; its *row id* is a small number
// (0 .. max_num_rows-1) that the scheduler chooses and reuses. A row's *block table* lists device
// blocks: token position p of the row lives in block `table[p / block_size]` at offset
// `p % block_size`. A *step* is one ScheduleBatch executed.
//
// # Columns
//
// Rows travel as packed parallel arrays. A column is a `bytes` field that holds fixed-width
// little-endian elements without any header:
//   i32 column: signed 32 bit    i64 column: signed 64 bit
//   u8 column:  unsigned 8 bit   f32 column: IEEE 754 single
// (On the wire an i32 column is identical to a packed `repeated sfixed32`.) A column whose length
// is not a multiple of its element width, or does not agree with its parallel columns, makes the
// batch MALFORMED. *Offsets* columns (CSR) have one element more than the things they delimit:
// the elements of thing i are `data[offsets[i] .. offsets[i+1]-1]`; offsets[0] is 0, they never
// decrease, and the last is the length of the data. For no things at all, the empty column is
// equal to the one element 0. For N things of which none has data, N + 1 zeros are sent: only where
// the column's own comment gives the empty column a meaning may it stand for that.
//
// # Sampling is a pure function
//
// A sampled token depends only on (logits, sampling params, seed, position, token history), never
// on what shares the batch or on generator state, so that a sequence can continue on any executor.
// See SamplingParams for the exact arithmetic.
//
// # Several tokens of a row in one step
//
// Since 1.4, needs FEATURE_SEVERAL_TOKENS. A row that samples may get more than one token in a step:
// those that as many steps of one token each would have brought, each sampled with its own position
// and after the tokens before it (penalties, bad words, min_tokens, grammar), each with its own
// scores. How many it may get, the batch says; how many it gets is the executor's business, at least
// one. There are two ways, of which a row may go both in one step, in this order:
//   drafts      guesses of the tokens that follow its input (Work.draft_token_ids). They are input
//               tokens at the positions after it. A token is sampled from the logits of the last
//               input token and of each draft, as if the drafts before it were tokens of the row.
//               The first of these is taken; the next as long as each draft before it is what was
//               sampled in its place. So a row with d drafts gets 1 to d + 1 tokens.
//   running on  (Work.num_run_on_tokens) the token taken last is the only input token at its
//               position, and the next one is sampled from its logits; so often at most.
// No token is taken behind one that is among the row's stop_token_ids.
//
// Input and drafts of all rows are computed together, as the order inside a step says; each turn of
// the rows that run on comes after that. No row reads what another writes in such a turn.
// What a row's status says is of its first token. A later one that cannot be sampled, for whatever
// reason, is not taken, and the row is OK with those before it: the step that goes on from there
// meets the same trouble with its first token. So does a step that fails after its first turn.
//
// Afterwards the slots before the row's last token hold the keys and values of its tokens. What it
// was allowed to write from there on is undefined; that token is its next input.

// @generated by protoc-gen-es v2.13.0 with parameter "target=ts,import_extension=js"
// @generated from file splitserve/executor/v1/executor.proto (package splitserve.executor.v1, syntax proto3)
/* eslint-disable */

import type { GenEnum, GenFile, GenMessage, GenService } from "@bufbuild/protobuf/codegenv2";
import { enumDesc, fileDesc, messageDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import type { Message } from "@bufbuild/protobuf";

/**
 * Describes the file splitserve/executor/v1/executor.proto.
 */
export const file_splitserve_executor_v1_executor: GenFile = /*@__PURE__*/
  fileDesc("CiVzcGxpdHNlcnZlL2V4ZWN1dG9yL3YxL2V4ZWN1dG9yLnByb3RvEhZzcGxpdHNlcnZlLmV4ZWN1dG9yLnYxIhAKDkdldEluZm9SZXF1ZXN0ImwKD0dldEluZm9SZXNwb25zZRI2CghleGVjdXRvchgBIAEoCzIkLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuRXhlY3V0b3JJbmZvEhAKCGRyYWluaW5nGAIgASgIEg8KB2RyYWluZWQYAyABKAgiFQoTR2V0VG9rZW5pemVyUmVxdWVzdCI3ChRHZXRUb2tlbml6ZXJSZXNwb25zZRIRCglmaWxlX25hbWUYASABKAkSDAoEZGF0YRgCIAEoDCIvCg9Db250cmFjdFZlcnNpb24SDQoFbWFqb3IYASABKAUSDQoFbWlub3IYAiABKAUiiAUKDEV4ZWN1dG9ySW5mbxJBChBjb250cmFjdF92ZXJzaW9uGAEgASgLMicuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5Db250cmFjdFZlcnNpb24SFgoOZXhlY3V0b3JfZXBvY2gYAiABKAMSDwoHYWRkcmVzcxgDIAEoCRIwCgVtb2RlbBgEIAEoCzIhLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuTW9kZWxJbmZvEhkKEWJsb2NrX3NpemVfdG9rZW5zGAUgASgFEhkKEW51bV9kZXZpY2VfYmxvY2tzGAYgASgFEhcKD251bV9ob3N0X2Jsb2NrcxgHIAEoBRITCgtibG9ja19ieXRlcxgIIAEoAxI2CgZsaW1pdHMYCSABKAsyJi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLkV4ZWN1dG9yTGltaXRzEjEKCGZlYXR1cmVzGAogAygOMh8uc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5GZWF0dXJlEhgKEHNvZnR3YXJlX3ZlcnNpb24YCyABKAkSHgoWbmV3ZXN0X3NjaGVkdWxlcl9lcG9jaBgMIAEoAxIXCg9zdGVwX3J1bm5pbmdfbXMYDSABKAMSNQoKdHJpYWxfc3RlcBgOIAEoCzIhLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuVHJpYWxTdGVwEh0KEHNhbXBsaW5nX3ZlcnNpb24YDyABKAVIAIgBARIPCgdjb21wdXRlGBAgASgJEhsKE3Nsb3dfY29tcHV0ZV9yZWFzb24YESABKAkSHwoXYW5zd2Vyc193aGlsZV9jb21wdXRpbmcYEiABKAhCEwoRX3NhbXBsaW5nX3ZlcnNpb24iRgoJVHJpYWxTdGVwEhIKCm51bV90b2tlbnMYASABKAUSFAoMbnVtX2F0dGVuZGVkGAIgASgDEg8KB3Rvb2tfdXMYAyABKAMioAIKCU1vZGVsSW5mbxIMCgRuYW1lGAEgASgJEg4KBmRpZ2VzdBgCIAEoCRINCgVkdHlwZRgDIAEoCRIWCg5rdl9jYWNoZV9kdHlwZRgEIAEoCRISCgp2b2NhYl9zaXplGAUgASgFEhwKFG1heF9tb2RlbF9sZW5fdG9rZW5zGAYgASgFEhUKDWVvc190b2tlbl9pZHMYByADKAUSIgoVc2xpZGluZ193aW5kb3dfdG9rZW5zGAggASgFSACIAQESRwoXZGVmYXVsdF9zYW1wbGluZ19wYXJhbXMYCSABKAsyJi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlNhbXBsaW5nUGFyYW1zQhgKFl9zbGlkaW5nX3dpbmRvd190b2tlbnMiuwEKDkV4ZWN1dG9yTGltaXRzEhQKDG1heF9udW1fcm93cxgBIAEoBRIeChZtYXhfbnVtX2JhdGNoZWRfdG9rZW5zGAIgASgFEhkKEW1heF9tZXNzYWdlX2J5dGVzGAMgASgFEhoKEm1heF9pbmZsaWdodF9zdGVwcxgEIAEoBRIiChVtYXhfYWRhcHRlcnNfcGVyX3N0ZXAYBSABKAVIAIgBAUIYChZfbWF4X2FkYXB0ZXJzX3Blcl9zdGVwIs0DCg1TY2hlZHVsZUJhdGNoEhcKD3NjaGVkdWxlcl9lcG9jaBgBIAEoAxIWCg5leGVjdXRvcl9lcG9jaBgCIAEoAxIPCgdzdGVwX2lkGAMgASgDEhkKDGJhc2Vfc3RlcF9pZBgEIAEoA0gAiAEBEhcKD3JlbW92ZWRfcm93X2lkcxgFIAEoDBIxCghuZXdfcm93cxgGIAEoCzIfLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuTmV3Um93cxI5Cgx0YWJsZV93cml0ZXMYByABKAsyIy5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlRhYmxlV3JpdGVzEjQKCHN3YXBfb3V0GAggASgLMiIuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5CbG9ja01vdmVzEjMKB3N3YXBfaW4YCSABKAsyIi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLkJsb2NrTW92ZXMSMAoEY29weRgKIAEoCzIiLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuQmxvY2tNb3ZlcxIqCgR3b3JrGAsgASgLMhwuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5Xb3JrQg8KDV9iYXNlX3N0ZXBfaWQiRQoKQmxvY2tNb3ZlcxIYChBzb3VyY2VfYmxvY2tfaWRzGAEgASgMEh0KFWRlc3RpbmF0aW9uX2Jsb2NrX2lkcxgCIAEoDCK1AwoHTmV3Um93cxIPCgdyb3dfaWRzGAEgASgMEh8KF3NhbXBsaW5nX3BhcmFtc19pbmRleGVzGAIgASgMEg0KBXNlZWRzGAMgASgMEhkKEW51bV9wcm9tcHRfdG9rZW5zGAQgASgMEhUKDWJsb2NrX29mZnNldHMYBSABKAwSEQoJYmxvY2tfaWRzGAYgASgMEhcKD2hpc3Rvcnlfb2Zmc2V0cxgHIAEoDBIZChFoaXN0b3J5X3Rva2VuX2lkcxgIIAEoDBI/Cg9zYW1wbGluZ19wYXJhbXMYCSADKAsyJi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlNhbXBsaW5nUGFyYW1zEhcKD2FkYXB0ZXJfaW5kZXhlcxgKIAEoDBIQCghhZGFwdGVycxgLIAMoCRIbChNjcm9zc19ibG9ja19vZmZzZXRzGAwgASgMEhcKD2Nyb3NzX2Jsb2NrX2lkcxgNIAEoDBIXCg9lbmNvZGVyX29mZnNldHMYDiABKAwSGQoRZW5jb2Rlcl90b2tlbl9pZHMYDyABKAwSGgoSbnVtX2VuY29kZXJfdG9rZW5zGBAgASgMIl8KC1RhYmxlV3JpdGVzEg8KB3Jvd19pZHMYASABKAwSFQoNc3RhcnRfaW5kZXhlcxgCIAEoDBIVCg1ibG9ja19vZmZzZXRzGAMgASgMEhEKCWJsb2NrX2lkcxgEIAEoDCLXAQoEV29yaxIPCgdyb3dfaWRzGAEgASgMEhsKE251bV9jb21wdXRlZF90b2tlbnMYAiABKAwSFgoObnVtX25ld190b2tlbnMYAyABKAwSGgoSc2FtcGxlZF9zdGVwc19iYWNrGAQgASgMEhEKCXRva2VuX2lkcxgFIAEoDBIPCgdzYW1wbGVzGAYgASgMEhkKEW51bV9ydW5fb25fdG9rZW5zGAcgASgMEhUKDWRyYWZ0X29mZnNldHMYCCABKAwSFwoPZHJhZnRfdG9rZW5faWRzGAkgASgMIogGCg5TYW1wbGluZ1BhcmFtcxIYCgt0ZW1wZXJhdHVyZRgBIAEoAkgAiAEBEhIKBXRvcF9rGAIgASgFSAGIAQESEgoFdG9wX3AYAyABKAJIAogBARISCgVtaW5fcBgEIAEoAkgDiAEBEh8KEnJlcGV0aXRpb25fcGVuYWx0eRgFIAEoAkgEiAEBEh0KEHByZXNlbmNlX3BlbmFsdHkYBiABKAJIBYgBARIeChFmcmVxdWVuY3lfcGVuYWx0eRgHIAEoAkgGiAEBEkkKCmxvZ2l0X2JpYXMYCCADKAsyNS5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlNhbXBsaW5nUGFyYW1zLkxvZ2l0Qmlhc0VudHJ5EhcKCm1pbl90b2tlbnMYCSABKAVIB4gBARIcChRzdXBwcmVzc2VkX3Rva2VuX2lkcxgKIAMoBRIZCgxudW1fbG9ncHJvYnMYCyABKAVICIgBARIgChNudW1fcHJvbXB0X2xvZ3Byb2JzGAwgASgFSAmIAQESGQoRYWxsb3dlZF90b2tlbl9pZHMYDSADKAUSQgoTYmFkX3dvcmRzX3Rva2VuX2lkcxgOIAMoCzIlLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuVG9rZW5TZXF1ZW5jZRIwCgdncmFtbWFyGA8gASgLMh8uc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5HcmFtbWFyEhYKDnN0b3BfdG9rZW5faWRzGBAgAygFGjAKDkxvZ2l0Qmlhc0VudHJ5EgsKA2tleRgBIAEoBRINCgV2YWx1ZRgCIAEoAjoCOAFCDgoMX3RlbXBlcmF0dXJlQggKBl90b3Bfa0IICgZfdG9wX3BCCAoGX21pbl9wQhUKE19yZXBldGl0aW9uX3BlbmFsdHlCEwoRX3ByZXNlbmNlX3BlbmFsdHlCFAoSX2ZyZXF1ZW5jeV9wZW5hbHR5Qg0KC19taW5fdG9rZW5zQg8KDV9udW1fbG9ncHJvYnNCFgoUX251bV9wcm9tcHRfbG9ncHJvYnMiIgoNVG9rZW5TZXF1ZW5jZRIRCgl0b2tlbl9pZHMYASADKAUifQoHR3JhbW1hchIVCgtqc29uX3NjaGVtYRgBIAEoCUgAEg8KBXJlZ2V4GAIgASgJSAASDgoEbGFyaxgDIAEoCUgAEjIKB2Nob2ljZXMYBCABKAsyHy5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLkNob2ljZXNIAEIGCgRraW5kIhgKB0Nob2ljZXMSDQoFdGV4dHMYASADKAkiZAoJU3RlcEVycm9yEjcKBnJlYXNvbhgBIAEoDjInLnNwbGl0c2VydmUuZXhlY3V0b3IudjEuU3RlcEVycm9yUmVhc29uEg0KBWZpZWxkGAIgASgJEg8KB21lc3NhZ2UYAyABKAki2QMKClN0ZXBSZXN1bHQSFwoPc2NoZWR1bGVyX2Vwb2NoGAEgASgDEhYKDmV4ZWN1dG9yX2Vwb2NoGAIgASgDEg8KB3N0ZXBfaWQYAyABKAMSMgoGc3RhdHVzGAQgASgOMiIuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5TdGVwU3RhdHVzEjAKBWVycm9yGAUgASgLMiEuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5TdGVwRXJyb3ISFAoMcm93X3N0YXR1c2VzGAYgASgMEhkKEXNhbXBsZWRfdG9rZW5faWRzGAcgASgMEjQKCnJvd19lcnJvcnMYCCADKAsyIC5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlJvd0Vycm9yEjIKCGxvZ3Byb2JzGAkgASgLMiAuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5Mb2dwcm9icxI5Cg9wcm9tcHRfbG9ncHJvYnMYCiABKAsyIC5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLkxvZ3Byb2JzEjQKB3RpbWluZ3MYCyABKAsyIy5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlN0ZXBUaW1pbmdzEhcKD3NhbXBsZWRfb2Zmc2V0cxgMIAEoDCIuCghSb3dFcnJvchIRCglyb3dfaW5kZXgYASABKAUSDwoHbWVzc2FnZRgCIAEoCSKoAQoITG9ncHJvYnMSEwoLcm93X2luZGV4ZXMYASABKAwSEQoJcG9zaXRpb25zGAIgASgMEhEKCXRva2VuX2lkcxgDIAEoDBIQCghsb2dwcm9icxgEIAEoDBINCgVyYW5rcxgFIAEoDBITCgt0b3Bfb2Zmc2V0cxgGIAEoDBIVCg10b3BfdG9rZW5faWRzGAcgASgMEhQKDHRvcF9sb2dwcm9icxgIIAEoDCJXCgtTdGVwVGltaW5ncxIQCghxdWV1ZV91cxgBIAEoAxIPCgdtb3ZlX3VzGAIgASgDEhIKCmZvcndhcmRfdXMYAyABKAMSEQoJc2FtcGxlX3VzGAQgASgDKocCCgdGZWF0dXJlEhcKE0ZFQVRVUkVfVU5TUEVDSUZJRUQQABIUChBGRUFUVVJFX0xPR1BST0JTEAESGwoXRkVBVFVSRV9QUk9NUFRfTE9HUFJPQlMQAhIVChFGRUFUVVJFX1BFTkFMVElFUxADEhYKEkZFQVRVUkVfTE9HSVRfQklBUxAEEhQKEEZFQVRVUkVfQURBUFRFUlMQBRIbChdGRUFUVVJFX0NST1NTX0FUVEVOVElPThAGEh0KGUZFQVRVUkVfVE9LRU5fQ09OU1RSQUlOVFMQBxITCg9GRUFUVVJFX0dSQU1NQVIQCBIaChZGRUFUVVJFX1NFVkVSQUxfVE9LRU5TEAkqjQEKClN0ZXBTdGF0dXMSGwoXU1RFUF9TVEFUVVNfVU5TUEVDSUZJRUQQABISCg5TVEVQX1NUQVRVU19PSxABEh0KGVNURVBfU1RBVFVTX05FRURfU05BUFNIT1QQAhIXChNTVEVQX1NUQVRVU19SRUZVU0VEEAMSFgoSU1RFUF9TVEFUVVNfRkFJTEVEEAQq/wQKD1N0ZXBFcnJvclJlYXNvbhIhCh1TVEVQX0VSUk9SX1JFQVNPTl9VTlNQRUNJRklFRBAAEisKJ1NURVBfRVJST1JfUkVBU09OX1NUQUxFX1NDSEVEVUxFUl9FUE9DSBABEioKJlNURVBfRVJST1JfUkVBU09OX1dST05HX0VYRUNVVE9SX0VQT0NIEAISIAocU1RFUF9FUlJPUl9SRUFTT05fU1RBTEVfU1RFUBADEh8KG1NURVBfRVJST1JfUkVBU09OX01BTEZPUk1FRBAEEigKJFNURVBfRVJST1JfUkVBU09OX0JMT0NLX09VVF9PRl9SQU5HRRAFEiMKH1NURVBfRVJST1JfUkVBU09OX0JMT0NLX09WRVJMQVAQBhIhCh1TVEVQX0VSUk9SX1JFQVNPTl9ST1dfVU5LTk9XThAHEiAKHFNURVBfRVJST1JfUkVBU09OX1JPV19FWElTVFMQCBIrCidTVEVQX0VSUk9SX1JFQVNPTl9QT1NJVElPTl9PVVRfT0ZfUkFOR0UQCRIoCiRTVEVQX0VSUk9SX1JFQVNPTl9UT0tFTl9PVVRfT0ZfUkFOR0UQChIkCiBTVEVQX0VSUk9SX1JFQVNPTl9MSU1JVF9FWENFRURFRBALEikKJVNURVBfRVJST1JfUkVBU09OX0ZFQVRVUkVfVU5TVVBQT1JURUQQDBIjCh9TVEVQX0VSUk9SX1JFQVNPTl9PVVRfT0ZfTUVNT1JZEA0SHgoaU1RFUF9FUlJPUl9SRUFTT05fSU5URVJOQUwQDhIsCihTVEVQX0VSUk9SX1JFQVNPTl9GVVRVUkVfU0NIRURVTEVSX0VQT0NIEA8qzgEKCVJvd1N0YXR1cxIaChZST1dfU1RBVFVTX1VOU1BFQ0lGSUVEEAASEQoNUk9XX1NUQVRVU19PSxABEh0KGVJPV19TVEFUVVNfSU5WQUxJRF9MT0dJVFMQAhIgChxST1dfU1RBVFVTX0lOUFVUX1VOQVZBSUxBQkxFEAMSFQoRUk9XX1NUQVRVU19GQUlMRUQQBBIaChZST1dfU1RBVFVTX05PVF9TQU1QTEVEEAUSHgoaUk9XX1NUQVRVU19HUkFNTUFSX0lOVkFMSUQQBjK0AgoPRXhlY3V0b3JTZXJ2aWNlEloKB0dldEluZm8SJi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLkdldEluZm9SZXF1ZXN0Gicuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5HZXRJbmZvUmVzcG9uc2USawoMR2V0VG9rZW5pemVyEisuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5HZXRUb2tlbml6ZXJSZXF1ZXN0Giwuc3BsaXRzZXJ2ZS5leGVjdXRvci52MS5HZXRUb2tlbml6ZXJSZXNwb25zZTABElgKB0V4ZWN1dGUSJS5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlNjaGVkdWxlQmF0Y2gaIi5zcGxpdHNlcnZlLmV4ZWN1dG9yLnYxLlN0ZXBSZXN1bHQoATABYgZwcm90bzM");

/**
 * Asks for ExecutorInfo.
 *
 * @generated from message splitserve.executor.v1.GetInfoRequest
 */
export type GetInfoRequest = Message<"splitserve.executor.v1.GetInfoRequest"> & {
};

/**
 * Describes the message splitserve.executor.v1.GetInfoRequest.
 * Use `create(GetInfoRequestSchema)` to create a new message.
 */
export const GetInfoRequestSchema: GenMessage<GetInfoRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 0);

/**
 * Answers with ExecutorInfo.
 *
 * @generated from message splitserve.executor.v1.GetInfoResponse
 */
export type GetInfoResponse = Message<"splitserve.executor.v1.GetInfoResponse"> & {
  /**
   * What this executor is.
   *
   * @generated from field: splitserve.executor.v1.ExecutorInfo executor = 1;
   */
  executor?: ExecutorInfo | undefined;

  /**
   * Whether it is about to end, and says so to its scheduler (RegistryService.Leave). It still
   * executes what it is sent.
   *
   * @generated from field: bool draining = 2;
   */
  draining: boolean;

  /**
   * Whether a scheduler sent it away (Register was refused with EXECUTOR_DRAINED), and none has
   * opened a stream since: it remembers that for schedulers that restart, or that it goes to. One
   * that registers is refused for it (EXECUTOR_DRAINED) until an operator takes it back
   * (AdminService.UndrainExecutor). It ends with the process.
   *
   * @generated from field: bool drained = 3;
   */
  drained: boolean;
};

/**
 * Describes the message splitserve.executor.v1.GetInfoResponse.
 * Use `create(GetInfoResponseSchema)` to create a new message.
 */
export const GetInfoResponseSchema: GenMessage<GetInfoResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 1);

/**
 * Asks for the tokenizer files.
 *
 * @generated from message splitserve.executor.v1.GetTokenizerRequest
 */
export type GetTokenizerRequest = Message<"splitserve.executor.v1.GetTokenizerRequest"> & {
};

/**
 * Describes the message splitserve.executor.v1.GetTokenizerRequest.
 * Use `create(GetTokenizerRequestSchema)` to create a new message.
 */
export const GetTokenizerRequestSchema: GenMessage<GetTokenizerRequest> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 2);

/**
 * One piece of one tokenizer file.
 *
 * @generated from message splitserve.executor.v1.GetTokenizerResponse
 */
export type GetTokenizerResponse = Message<"splitserve.executor.v1.GetTokenizerResponse"> & {
  /**
   * Name of the file in the model's directory: `tokenizer.json`, or, with a slash,
   * `additional_chat_templates/rag.jinja`. Allowed are up to 255 printable characters, as a relative
   * path that stays in its folder, without backslashes and colons; the executor counts as lost after
   * any other. Who writes it to a disk sees to it that it stays there.
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
 * Describes the message splitserve.executor.v1.GetTokenizerResponse.
 * Use `create(GetTokenizerResponseSchema)` to create a new message.
 */
export const GetTokenizerResponseSchema: GenMessage<GetTokenizerResponse> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 3);

/**
 * Version of this contract. Equal majors can talk; within a major, fields and enum values are only
 * added, and the scheduler uses an addition only where the executor announces it: by a feature, or
 * by a field of its ExecutorInfo.
 *
 * @generated from message splitserve.executor.v1.ContractVersion
 */
export type ContractVersion = Message<"splitserve.executor.v1.ContractVersion"> & {
  /**
   * Grows with an incompatible change. This file: 1.
   *
   * @generated from field: int32 major = 1;
   */
  major: number;

  /**
   * Grows with a compatible addition. This file: 5.
   *
   * @generated from field: int32 minor = 2;
   */
  minor: number;
};

/**
 * Describes the message splitserve.executor.v1.ContractVersion.
 * Use `create(ContractVersionSchema)` to create a new message.
 */
export const ContractVersionSchema: GenMessage<ContractVersion> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 4);

/**
 * What an executor is. Every field is required unless it says otherwise; registration with a value
 * outside its range is refused (EXECUTOR_INFO_INVALID). Texts have up to 1024 characters.
 *
 * @generated from message splitserve.executor.v1.ExecutorInfo
 */
export type ExecutorInfo = Message<"splitserve.executor.v1.ExecutorInfo"> & {
  /**
   * The contract the executor was written to.
   *
   * @generated from field: splitserve.executor.v1.ContractVersion contract_version = 1;
   */
  contractVersion?: ContractVersion | undefined;

  /**
   * Names this life of the executor: nanoseconds since 1970 when the process started. A restarted
   * executor has a larger one, and its KV blocks are gone. So has one that went from one scheduler to
   * another: of the lives before it knows nothing, the scheduler epochs that it had adopted included.
   *
   * @generated from field: int64 executor_epoch = 2;
   */
  executorEpoch: bigint;

  /**
   * `host:port` under which the scheduler reaches ExecutorService; names the executor among others.
   * At most 300 characters.
   *
   * @generated from field: string address = 3;
   */
  address: string;

  /**
   * The model it serves.
   *
   * @generated from field: splitserve.executor.v1.ModelInfo model = 4;
   */
  model?: ModelInfo | undefined;

  /**
   * Tokens per KV block, 1 to 65536.
   *
   * @generated from field: int32 block_size_tokens = 5;
   */
  blockSizeTokens: number;

  /**
   * Size of the device pool, 1 to 2^24.
   *
   * @generated from field: int32 num_device_blocks = 6;
   */
  numDeviceBlocks: number;

  /**
   * Size of the host pool, 0 to 2^24; 0 means that swapping is impossible.
   *
   * @generated from field: int32 num_host_blocks = 7;
   */
  numHostBlocks: number;

  /**
   * Bytes of one block over all layers, keys and values; for information and cost models. At
   * most 2^40. Optional.
   *
   * @generated from field: int64 block_bytes = 8;
   */
  blockBytes: bigint;

  /**
   * What one step may ask for.
   *
   * @generated from field: splitserve.executor.v1.ExecutorLimits limits = 9;
   */
  limits?: ExecutorLimits | undefined;

  /**
   * Optional abilities; a request that needs a missing one is refused by the scheduler, by name.
   *
   * @generated from field: repeated splitserve.executor.v1.Feature features = 10;
   */
  features: Feature[];

  /**
   * Software version, for logs only. Optional.
   *
   * @generated from field: string software_version = 11;
   */
  softwareVersion: string;

  /**
   * The newest scheduler_epoch it has adopted, 0 for none; what GetInfo says counts. A scheduler
   * whose own is older (a clock was set back before it started) speaks to this executor with one
   * that is newer than this. Earlier executors do not say it.
   *
   * @generated from field: int64 newest_scheduler_epoch = 12;
   */
  newestSchedulerEpoch: bigint;

  /**
   * For how long the oldest batch that it has received is not answered, in milliseconds, 0 without
   * one; what GetInfo says counts. Whoever hangs in a step is not taken before it is done with it,
   * and whoever was given up not before it is done with all that it has received.
   * Earlier executors do not say it.
   *
   * @generated from field: int64 step_running_ms = 13;
   */
  stepRunningMs: bigint;

  /**
   * A step that it ran by itself before it was ready. Present only if steps need nothing to be loaded,
   * compiled or recorded any more that would take them seconds: then the scheduler goes by it for how
   * long the first steps may take (a multiple, and at least seconds), and gives up an executor that
   * hangs in one of them. Without it these have all the time there is. Earlier executors do not say
   * it.
   *
   * @generated from field: splitserve.executor.v1.TrialStep trial_step = 14;
   */
  trialStep?: TrialStep | undefined;

  /**
   * Version of the arithmetic of SamplingParams that it computes, 1 or more. It grows whenever the
   * same logits, parameters, seed and position may give another token:
   *   1  min_p comes before top_p;
   *   2  min_p comes after top_p, as this file has it.
   * Absent: 1 for a contract version before 1.2, else 2. A request whose tokens would differ between
   * versions is given to executors of version 2 only, wherever it goes on; all other requests go to
   * any. An executor of a version that the scheduler does not know is refused
   * (CONTRACT_VERSION_MISMATCH). Since 1.5.
   *
   * @generated from field: optional int32 sampling_version = 15;
   */
  samplingVersion?: number | undefined;

  /**
   * Which code computes the model ("native decoder (avx512_bf16)"), for people. At most 1024
   * characters. Optional.
   *
   * @generated from field: string compute = 16;
   */
  compute: string;

  /**
   * Why that is not the fastest code there is for such a model on such a device, for people. Empty if
   * it is, or if the executor does not say. At most 1024 characters. Optional.
   *
   * @generated from field: string slow_compute_reason = 17;
   */
  slowComputeReason: string;

  /**
   * Whether it answers GetInfo within a second whatever it computes. Then one that answers nothing
   * for 4.5 s, while others do, is given up; without it that holds only while it has no step to
   * answer. Earlier executors do not say it.
   *
   * @generated from field: bool answers_while_computing = 18;
   */
  answersWhileComputing: boolean;
};

/**
 * Describes the message splitserve.executor.v1.ExecutorInfo.
 * Use `create(ExecutorInfoSchema)` to create a new message.
 */
export const ExecutorInfoSchema: GenMessage<ExecutorInfo> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 5);

/**
 * How long a step took, and what there was to do.
 *
 * @generated from message splitserve.executor.v1.TrialStep
 */
export type TrialStep = Message<"splitserve.executor.v1.TrialStep"> & {
  /**
   * Input tokens of all rows, >= 1.
   *
   * @generated from field: int32 num_tokens = 1;
   */
  numTokens: number;

  /**
   * Over all rows: input tokens times the tokens that the row has with them, summed up; >= 1. At
   * most 2^50.
   *
   * @generated from field: int64 num_attended = 2;
   */
  numAttended: bigint;

  /**
   * From its beginning until it could be answered, in microseconds; 1 to 2^50.
   *
   * @generated from field: int64 took_us = 3;
   */
  tookUs: bigint;
};

/**
 * Describes the message splitserve.executor.v1.TrialStep.
 * Use `create(TrialStepSchema)` to create a new message.
 */
export const TrialStepSchema: GenMessage<TrialStep> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 6);

/**
 * The model as far as scheduling and clients need it.
 *
 * @generated from message splitserve.executor.v1.ModelInfo
 */
export type ModelInfo = Message<"splitserve.executor.v1.ModelInfo"> & {
  /**
   * Name shown to clients, not empty.
   *
   * @generated from field: string name = 1;
   */
  name: string;

  /**
   * Lower-case hex SHA-256 (64 digits) that identifies configuration and weights. All executors of
   * one scheduler must have the same one, and the same dtype and kv_cache_dtype, because a request
   * may go on at another executor; otherwise registration is refused (MODEL_MISMATCH). The scheduler
   * goes by the first that answered it, and was connected, as long as its process lives: to serve
   * another model, restart it.
   *
   * @generated from field: string digest = 2;
   */
  digest: string;

  /**
   * Data type of weights and activations: "float32", "bfloat16" or "float16".
   *
   * @generated from field: string dtype = 3;
   */
  dtype: string;

  /**
   * Data type of the KV cache: one of those of dtype, or "float8_e4m3fn".
   *
   * @generated from field: string kv_cache_dtype = 4;
   */
  kvCacheDtype: string;

  /**
   * Token ids are 0 .. vocab_size-1; 1 to 2^24.
   *
   * @generated from field: int32 vocab_size = 5;
   */
  vocabSize: number;

  /**
   * Most tokens (prompt and output together) one sequence may have, 2 to 2^24.
   *
   * @generated from field: int32 max_model_len_tokens = 6;
   */
  maxModelLenTokens: number;

  /**
   * Tokens that end a sequence unless the request says `ignore_eos`. May be empty; at most 4096.
   *
   * @generated from field: repeated int32 eos_token_ids = 7;
   */
  eosTokenIds: number[];

  /**
   * Present exactly if EVERY layer of the model attends only to the last W tokens, the token itself
   * included: from position p to positions p-W+1 .. p. >= 1. Then a row whose next input token is
   * at position n never again needs a block all of whose positions are before n-W+1. The scheduler
   * may give such a block to others while the row's block table goes on naming it, and may send -1
   * instead of it; what the block holds, NaN included, has no influence on the row. Since 1.1.
   *
   * @generated from field: optional int32 sliding_window_tokens = 8;
   */
  slidingWindowTokens?: number | undefined;

  /**
   * What the model's authors recommend; told to clients, and no default of any request. Only
   * temperature, top_k, top_p, min_p and repetition_penalty count; one outside its range in
   * scheduler.proto is not passed on. Absent: nothing. Since 1.2.
   *
   * @generated from field: splitserve.executor.v1.SamplingParams default_sampling_params = 9;
   */
  defaultSamplingParams?: SamplingParams | undefined;
};

/**
 * Describes the message splitserve.executor.v1.ModelInfo.
 * Use `create(ModelInfoSchema)` to create a new message.
 */
export const ModelInfoSchema: GenMessage<ModelInfo> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 7);

/**
 * What one step may ask for; a batch that exceeds a limit is refused (LIMIT_EXCEEDED).
 *
 * @generated from message splitserve.executor.v1.ExecutorLimits
 */
export type ExecutorLimits = Message<"splitserve.executor.v1.ExecutorLimits"> & {
  /**
   * Row ids are 0 .. max_num_rows-1, >= 1; also the most rows of one step.
   *
   * @generated from field: int32 max_num_rows = 1;
   */
  maxNumRows: number;

  /**
   * Most input tokens of one step, over all rows; >= 1. Encoder tokens do not count.
   *
   * @generated from field: int32 max_num_batched_tokens = 2;
   */
  maxNumBatchedTokens: number;

  /**
   * Largest ScheduleBatch in bytes, >= 65536. The scheduler makes its steps small enough.
   *
   * @generated from field: int32 max_message_bytes = 3;
   */
  maxMessageBytes: number;

  /**
   * Most batches without a result at any moment (the credit), >= 1; repeats count. A scheduler
   * never exceeds it; an executor need not check, it may simply not read on. It stores at least
   * this many of its latest results for repeats.
   *
   * @generated from field: int32 max_inflight_steps = 4;
   */
  maxInflightSteps: number;

  /**
   * Most distinct adapters among the rows of one `work`; rows without an adapter do not count.
   * Present, and then >= 1, exactly if FEATURE_ADAPTERS is announced. Since 1.1.
   *
   * @generated from field: optional int32 max_adapters_per_step = 5;
   */
  maxAdaptersPerStep?: number | undefined;
};

/**
 * Describes the message splitserve.executor.v1.ExecutorLimits.
 * Use `create(ExecutorLimitsSchema)` to create a new message.
 */
export const ExecutorLimitsSchema: GenMessage<ExecutorLimits> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 8);

/**
 * One step. The executor does, in this order and each wholly before the next:
 *   1. decide by the identity rules below whether to run it at all;
 *   2. validate everything (ranges, lengths, overlaps, limits); a bad batch changes nothing;
 *   3. row table: `removed_row_ids`, then `new_rows`, then `table_writes`;
 *   4. block moves: `swap_out`, then `swap_in`, then `copy`;
 *   5. compute the rows of `work`: encoder tokens that wait for this step are encoded into their
 *      cross blocks; then, in every layer, the new keys and values of ALL rows are written before
 *      ANY row's attention reads, so a row may read a block that another row of the same step
 *      fills;
 *   6. sample.
 *
 * Identity rules. Let L be the latest step that was *applied* (its result was OK or FAILED) in this
 * pair of epochs; none at first.
 *   a. executor_epoch is not this executor's                 -> REFUSED, WRONG_EXECUTOR_EPOCH.
 *   b. scheduler_epoch is older than the newest one adopted  -> REFUSED, STALE_SCHEDULER_EPOCH.
 *      It lies more than an hour in the future, by the executor's clock (an epoch is the time when
 *      a process started)                                    -> REFUSED, FUTURE_SCHEDULER_EPOCH.
 *      It is newer than any adopted: rules c to e go on as if there were no L yet, and if the batch
 *      is taken in the end the epoch is adopted with it: row table, stored results and L are
 *      forgotten first, and KV block contents undefined. A batch that is not taken leaves
 *      everything to the scheduler before. The epoch in a RegisterResponse is adopted at once,
 *      within the same bound.
 *   c. step_id <= L: a repeat. The stored result is returned and nothing executed; where it is no
 *      longer stored                                         -> REFUSED, STALE_STEP.
 *   d. a delta whose base_step_id is not L                   -> NEED_SNAPSHOT.
 *   e. otherwise the batch is taken. A snapshot needs only step_id > L.
 * REFUSED and NEED_SNAPSHOT leave everything as it was (L included) and are not stored. FAILED has
 * applied the row table changes, histories and earlier samples included; the contents of all blocks
 * that the step was to write, by moves or by rows, are then undefined.
 *
 * What the scheduler does with a step that is not OK: its rows' sequences are computed again from
 * their tokens, in other blocks or from the start of a block. After REFUSED and NEED_SNAPSHOT its
 * next batch is a snapshot. A snapshot is never answered NEED_SNAPSHOT: an executor that does so,
 * or refuses by one of rules a to c, is given up. After REFUSED and FAILED the requests of the step
 * are tried apart, in steps of a quarter of them and nobody else, with no other step in flight, and
 * in smaller ones where that fails again, until each has got a token; so are those that were in
 * flight when two executors in a row were lost. A request that is lost eight times in a row without
 * a new token is ended with an error.
 *
 * Which reason a refusal has: columns that cannot be read, or contradict each other or their
 * field's comment, are MALFORMED unless the comment names another reason. Where several apply, any
 * of them.
 *
 * @generated from message splitserve.executor.v1.ScheduleBatch
 */
export type ScheduleBatch = Message<"splitserve.executor.v1.ScheduleBatch"> & {
  /**
   * Names this life of the scheduler: nanoseconds since 1970 when its process started.
   *
   * @generated from field: int64 scheduler_epoch = 1;
   */
  schedulerEpoch: bigint;

  /**
   * The executor_epoch this batch is meant for.
   *
   * @generated from field: int64 executor_epoch = 2;
   */
  executorEpoch: bigint;

  /**
   * Number of this step, >= 1. A scheduler numbers its batches to one executor epoch one by one.
   *
   * @generated from field: int64 step_id = 3;
   */
  stepId: bigint;

  /**
   * Present: a delta on the row table as step `base_step_id` left it. Absent: a snapshot; the row
   * table is emptied before this batch's row changes are applied. Block contents are unaffected
   * either way.
   *
   * @generated from field: optional int64 base_step_id = 4;
   */
  baseStepId?: bigint | undefined;

  /**
   * i32 column: rows to forget. Each must exist (ROW_UNKNOWN); empty in a snapshot (MALFORMED).
   *
   * @generated from field: bytes removed_row_ids = 5;
   */
  removedRowIds: Uint8Array;

  /**
   * Rows to add.
   *
   * @generated from field: splitserve.executor.v1.NewRows new_rows = 6;
   */
  newRows?: NewRows | undefined;

  /**
   * Changes to block tables of rows that exist after `new_rows`.
   *
   * @generated from field: splitserve.executor.v1.TableWrites table_writes = 7;
   */
  tableWrites?: TableWrites | undefined;

  /**
   * Device -> host. `source` are device blocks, `destination` host blocks.
   *
   * @generated from field: splitserve.executor.v1.BlockMoves swap_out = 8;
   */
  swapOut?: BlockMoves | undefined;

  /**
   * Host -> device. `source` are host blocks, `destination` device blocks.
   *
   * @generated from field: splitserve.executor.v1.BlockMoves swap_in = 9;
   */
  swapIn?: BlockMoves | undefined;

  /**
   * Device -> device (copy-on-write). No block may be both a source and a destination.
   *
   * @generated from field: splitserve.executor.v1.BlockMoves copy = 10;
   */
  copy?: BlockMoves | undefined;

  /**
   * What to compute. Absent or empty: only the row changes and block moves are done; the result
   * then has empty columns.
   *
   * @generated from field: splitserve.executor.v1.Work work = 11;
   */
  work?: Work | undefined;
};

/**
 * Describes the message splitserve.executor.v1.ScheduleBatch.
 * Use `create(ScheduleBatchSchema)` to create a new message.
 */
export const ScheduleBatchSchema: GenMessage<ScheduleBatch> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 9);

/**
 * Block pairs of one phase. All reads of a phase happen before its writes are seen: as if every
 * source were read first. Destinations are distinct (else BLOCK_OVERLAP); one source may feed
 * several destinations.
 *
 * @generated from message splitserve.executor.v1.BlockMoves
 */
export type BlockMoves = Message<"splitserve.executor.v1.BlockMoves"> & {
  /**
   * i32 column: blocks to read.
   *
   * @generated from field: bytes source_block_ids = 1;
   */
  sourceBlockIds: Uint8Array;

  /**
   * i32 column, parallel: blocks to overwrite.
   *
   * @generated from field: bytes destination_block_ids = 2;
   */
  destinationBlockIds: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.BlockMoves.
 * Use `create(BlockMovesSchema)` to create a new message.
 */
export const BlockMovesSchema: GenMessage<BlockMoves> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 10);

/**
 * Rows to add. The first four columns are parallel: one element a row. So are `adapter_indexes` and
 * `num_encoder_tokens`, unless they are empty.
 *
 * Keys and values depend on the tokens before them, the row's adapter and its encoder tokens; rows
 * that share blocks agree in all of these.
 *
 * @generated from message splitserve.executor.v1.NewRows
 */
export type NewRows = Message<"splitserve.executor.v1.NewRows"> & {
  /**
   * i32 column: the ids, not in the row table after the removals (ROW_EXISTS) and distinct. An id
   * that was removed and comes again is a new row: nothing of the old one is remembered.
   *
   * @generated from field: bytes row_ids = 1;
   */
  rowIds: Uint8Array;

  /**
   * i32 column: index into `sampling_params` of this message.
   *
   * @generated from field: bytes sampling_params_indexes = 2;
   */
  samplingParamsIndexes: Uint8Array;

  /**
   * i64 column: the seed of the sequence, as the client gave it.
   *
   * @generated from field: bytes seeds = 3;
   */
  seeds: Uint8Array;

  /**
   * i32 column: how many leading tokens of the sequence are prompt, >= 1. Those after are output.
   *
   * @generated from field: bytes num_prompt_tokens = 4;
   */
  numPromptTokens: Uint8Array;

  /**
   * i32 offsets column into `block_ids`.
   *
   * @generated from field: bytes block_offsets = 5;
   */
  blockOffsets: Uint8Array;

  /**
   * i32 column: the initial block tables. Only for a model with `sliding_window_tokens` W an
   * element may be -1 (else BLOCK_OUT_OF_RANGE): an entry that the row does not need, see Work.
   *
   * @generated from field: bytes block_ids = 6;
   */
  blockIds: Uint8Array;

  /**
   * i32 offsets column into `history_token_ids`.
   *
   * @generated from field: bytes history_offsets = 7;
   */
  historyOffsets: Uint8Array;

  /**
   * i32 column: ALL tokens of the sequence known now, prompt first, whether their KV is computed or
   * not. Present for a row exactly if one of its penalties differs from the neutral value,
   * num_prompt_logprobs is present or one of its bad_words_token_ids has several tokens; otherwise
   * its part is empty. Present, too, for a row with a grammar. The executor appends every token it
   * samples for the row.
   *
   * @generated from field: bytes history_token_ids = 8;
   */
  historyTokenIds: Uint8Array;

  /**
   * The distinct parameter sets these rows use.
   *
   * @generated from field: repeated splitserve.executor.v1.SamplingParams sampling_params = 9;
   */
  samplingParams: SamplingParams[];

  /**
   * i32 column: index into `adapters` of this message, -1 for a row without an adapter. Empty
   * column: all -1. Since 1.1.
   *
   * @generated from field: bytes adapter_indexes = 10;
   */
  adapterIndexes: Uint8Array;

  /**
   * Names of the adapters that these rows use: distinct, not empty. Needs FEATURE_ADAPTERS
   * (FEATURE_UNSUPPORTED). An adapter changes all that is computed for its rows, encoder included.
   * One that the executor does not know or cannot apply fails its rows (ROW_STATUS_FAILED), in each
   * step that computes them. Since 1.1.
   *
   * @generated from field: repeated string adapters = 11;
   */
  adapters: string[];

  /**
   * i32 offsets column into `cross_block_ids`. Empty column: no row has any. Since 1.1.
   *
   * @generated from field: bytes cross_block_offsets = 12;
   */
  crossBlockOffsets: Uint8Array;

  /**
   * i32 column: the row's cross blocks, device blocks that hold the keys and values of its encoder
   * tokens for the cross attention of all decoder layers: encoder token j is in the block with
   * index j / block_size at offset j % block_size. They cover num_encoder_tokens
   * (POSITION_OUT_OF_RANGE); a row without encoder tokens has none (MALFORMED), and its decoder
   * attends to its own tokens only. The rows of one request name the same blocks. What moves these
   * blocks is `swap_out`, `swap_in` and `copy`; a row whose cross blocks change is removed and
   * added again. Needs FEATURE_CROSS_ATTENTION (FEATURE_UNSUPPORTED). Since 1.1.
   *
   * @generated from field: bytes cross_block_ids = 13;
   */
  crossBlockIds: Uint8Array;

  /**
   * i32 offsets column into `encoder_token_ids`. Empty column: no row has any. Since 1.1.
   *
   * @generated from field: bytes encoder_offsets = 14;
   */
  encoderOffsets: Uint8Array;

  /**
   * i32 column: the encoder tokens that are yet to be encoded, all in 0 .. vocab_size-1. A row
   * brings either all of its num_encoder_tokens or none (MALFORMED). They are encoded, and the
   * results written to the row's cross blocks, in the first step that has the row in `work`, before
   * any row's attention reads; once, whatever becomes of the row in that step. None where the
   * blocks have the results already (after a swap, say), or get them from another row by then. No
   * two rows encode into the same block. Needs FEATURE_CROSS_ATTENTION. Since 1.1.
   *
   * @generated from field: bytes encoder_token_ids = 15;
   */
  encoderTokenIds: Uint8Array;

  /**
   * i32 column: how many encoder tokens the row has, >= 0; each of its input tokens attends to all
   * of them. Empty column: all 0. More than 0 needs FEATURE_CROSS_ATTENTION. Since 1.1.
   *
   * @generated from field: bytes num_encoder_tokens = 16;
   */
  numEncoderTokens: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.NewRows.
 * Use `create(NewRowsSchema)` to create a new message.
 */
export const NewRowsSchema: GenMessage<NewRows> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 11);

/**
 * Overwrites or extends block tables: write i puts its blocks into the table of row `row_ids[i]`
 * at index `start_indexes[i]` and onward. start_index is at most the table's length (else
 * POSITION_OUT_OF_RANGE); what reaches past the end extends the table. A row occurs at most once.
 *
 * @generated from message splitserve.executor.v1.TableWrites
 */
export type TableWrites = Message<"splitserve.executor.v1.TableWrites"> & {
  /**
   * i32 column.
   *
   * @generated from field: bytes row_ids = 1;
   */
  rowIds: Uint8Array;

  /**
   * i32 column, parallel.
   *
   * @generated from field: bytes start_indexes = 2;
   */
  startIndexes: Uint8Array;

  /**
   * i32 offsets column into `block_ids`.
   *
   * @generated from field: bytes block_offsets = 3;
   */
  blockOffsets: Uint8Array;

  /**
   * i32 column: device blocks, or -1 as in NewRows.block_ids.
   *
   * @generated from field: bytes block_ids = 4;
   */
  blockIds: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.TableWrites.
 * Use `create(TableWritesSchema)` to create a new message.
 */
export const TableWritesSchema: GenMessage<TableWrites> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 12);

/**
 * The rows to compute, in order; StepResult answers by this order. No two rows write the same slot,
 * and none may: the slots of drafts, and of tokens that a row could get by running on, count as
 * written whether they are used or not.
 * Row i brings `num_new_tokens[i]` input tokens at positions num_computed_tokens[i] and following;
 * their keys and values are written to the row's blocks, and each attends to all positions of its
 * row up to and including its own (within the model's window, if it has one). So are drafts, at the
 * positions after them, and after these the tokens that a row which runs on gets, but for the last.
 *
 * Which entries of its block table the row needs: those of positions from 0 to that of its last
 * input token; with `sliding_window_tokens` W, only from max(0, n - W + 1) on, where n is the
 * position of its first input token. Where the scheduler does not know n yet (see
 * num_computed_tokens), it leaves the entries that the smallest possible n needs; the executor goes
 * by the actual n. None of these entries is -1 (BLOCK_OUT_OF_RANGE). Blocks of other entries are
 * neither read nor written.
 *
 * @generated from message splitserve.executor.v1.Work
 */
export type Work = Message<"splitserve.executor.v1.Work"> & {
  /**
   * i32 column: rows of the row table, distinct (ROW_UNKNOWN, MALFORMED), with no more distinct
   * adapters than ExecutorLimits.max_adapters_per_step (LIMIT_EXCEEDED).
   *
   * @generated from field: bytes row_ids = 1;
   */
  rowIds: Uint8Array;

  /**
   * i32 column: position of the first input token, >= 0. The row's block table must cover the last
   * one, with all that it may get in this step (POSITION_OUT_OF_RANGE): that is position
   * num_computed_tokens[i] + num_new_tokens[i] + drafts + num_run_on_tokens[i] - 1. It is below
   * max_model_len_tokens, also where the last block has room for more (POSITION_OUT_OF_RANGE).
   *
   * Where the input is a token sampled before, and steps under way may bring the row several, nobody
   * knows yet where it will be. This is then the largest position that it can have; its position is
   * that of the token, which the executor knows. Since 1.4.
   *
   * @generated from field: bytes num_computed_tokens = 2;
   */
  numComputedTokens: Uint8Array;

  /**
   * i32 column: number of input tokens, >= 1.
   *
   * @generated from field: bytes num_new_tokens = 3;
   */
  numNewTokens: Uint8Array;

  /**
   * i32 column: where the input comes from. 0: from `token_ids`. d >= 1: the row has exactly one
   * input token, and it is the last token this executor sampled for this row in step `step_id - d`
   * (the step may be unanswered yet: this is how steps are pipelined). If that step gave the row no
   * token, the row fails with INPUT_UNAVAILABLE; so it may if that token is among its
   * stop_token_ids (since 1.4). A scheduler asks only for the latest token sampled for the row, so
   * one token, its position and its step are enough to remember. Empty column: all 0.
   *
   * @generated from field: bytes sampled_steps_back = 4;
   */
  sampledStepsBack: Uint8Array;

  /**
   * i32 column: the literal input tokens of all rows with sampled_steps_back 0, concatenated in row
   * order, num_new_tokens of each. All in 0 .. vocab_size-1.
   *
   * @generated from field: bytes token_ids = 5;
   */
  tokenIds: Uint8Array;

  /**
   * u8 column: 1 if a token is sampled from the logits of the row's last input token, else 0 (the
   * chunk of a prompt that is not the last). Empty column: all 1.
   *
   * @generated from field: bytes samples = 6;
   */
  samples: Uint8Array;

  /**
   * i32 column: how many tokens more the row may get by running on, >= 0; 0 for a row that does not
   * sample (MALFORMED). They are no input tokens of ExecutorLimits.max_num_batched_tokens. Empty
   * column: all 0. Since 1.4.
   *
   * @generated from field: bytes num_run_on_tokens = 7;
   */
  numRunOnTokens: Uint8Array;

  /**
   * i32 offsets column into `draft_token_ids`. Empty column: no row has any. Since 1.4.
   *
   * @generated from field: bytes draft_offsets = 8;
   */
  draftOffsets: Uint8Array;

  /**
   * i32 column: the drafts, in 0 .. vocab_size-1; none for a row that does not sample (MALFORMED).
   * They count as input tokens of ExecutorLimits.max_num_batched_tokens. An executor may leave any
   * of them out, with all that follow it. Since 1.4.
   *
   * @generated from field: bytes draft_token_ids = 9;
   */
  draftTokenIds: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.Work.
 * Use `create(WorkSchema)` to create a new message.
 */
export const WorkSchema: GenMessage<Work> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 13);

/**
 * How a row's next token is chosen from its logits. Applied in this order, in float32:
 *   1. tokens `suppressed_token_ids` get -inf while the sequence has fewer than `min_tokens` output
 *      tokens; so do all but `allowed_token_ids`, what `bad_words_token_ids` forbids, and what
 *      `grammar` does not allow; `logit_bias` is added;
 *   2. repetition penalty over the distinct tokens of prompt and output: a positive logit is
 *      divided by it, a negative one multiplied; then, over output tokens only,
 *      `frequency_penalty` x count and `presence_penalty` x (count > 0) are subtracted;
 *   3. temperature 0: the token with the largest logit wins, the smallest id among equals. Done.
 *   4. logits are divided by the temperature;
 *   5. top_k keeps the k largest (ties with the k-th are kept), then top_p keeps the smallest set of
 *      most probable tokens whose probabilities (renormalised) sum to at least top_p, of equals the
 *      smaller ids first, then min_p keeps the tokens with probability >= min_p x the largest
 *      probability; the most probable token always stays. (In version 1 of this arithmetic min_p came
 *      before top_p, which is another set where a request has both: ExecutorInfo.sampling_version.)
 *   6. with u from (seed, position), the sampled token is the first, in order of token id, whose
 *      cumulative probability (renormalised over what was kept) is greater than u.
 *
 * What `generate` of the Python package transformers has of this it does alike and in this order,
 * but that it leaves open which of equally probable tokens top_p keeps. A row for which nothing is
 * left to be sampled has ROW_STATUS_INVALID_LOGITS.
 *
 * The random number: u = (a x 2^21 + (b >> 11)) / 2^53, where a, b are the first two of the four
 * 32-bit outputs of Philox4x32-10 (Salmon et al. 2011) with key (seed mod 2^32, seed div 2^32), the
 * seed taken as unsigned 64 bit, and counter (position mod 2^32, position div 2^32, 0, 0). position
 * is the index in the sequence of the token being sampled (the number of tokens before it).
 *
 * @generated from message splitserve.executor.v1.SamplingParams
 */
export type SamplingParams = Message<"splitserve.executor.v1.SamplingParams"> & {
  /**
   * >= 0; 0 is greedy. Absent: 1.
   *
   * @generated from field: optional float temperature = 1;
   */
  temperature?: number | undefined;

  /**
   * >= 1. Absent: no limit. (The 0 and -1 of the client API are never sent.)
   *
   * @generated from field: optional int32 top_k = 2;
   */
  topK?: number | undefined;

  /**
   * In (0, 1]. Absent: 1.
   *
   * @generated from field: optional float top_p = 3;
   */
  topP?: number | undefined;

  /**
   * In [0, 1]. Absent: 0.
   *
   * @generated from field: optional float min_p = 4;
   */
  minP?: number | undefined;

  /**
   * > 0. Absent: 1.
   *
   * @generated from field: optional float repetition_penalty = 5;
   */
  repetitionPenalty?: number | undefined;

  /**
   * Absent: 0.
   *
   * @generated from field: optional float presence_penalty = 6;
   */
  presencePenalty?: number | undefined;

  /**
   * Absent: 0.
   *
   * @generated from field: optional float frequency_penalty = 7;
   */
  frequencyPenalty?: number | undefined;

  /**
   * Token id -> added to its logit; not NaN and not +inf (MALFORMED). -inf: the token is never
   * sampled; needs FEATURE_TOKEN_CONSTRAINTS (FEATURE_UNSUPPORTED).
   *
   * @generated from field: map<int32, float> logit_bias = 8;
   */
  logitBias: { [key: number]: number };

  /**
   * Output tokens before which `suppressed_token_ids` cannot be sampled. Absent: 0.
   *
   * @generated from field: optional int32 min_tokens = 9;
   */
  minTokens?: number | undefined;

  /**
   * Tokens that would end the sequence.
   *
   * @generated from field: repeated int32 suppressed_token_ids = 10;
   */
  suppressedTokenIds: number[];

  /**
   * Present: return the sampled token's logprob and rank, and the top N alternatives. N >= 0; where
   * it is more than vocab_size, all tokens.
   *
   * @generated from field: optional int32 num_logprobs = 11;
   */
  numLogprobs?: number | undefined;

  /**
   * Present: return the same for every prompt token computed, except the first of the prompt.
   *
   * @generated from field: optional int32 num_prompt_logprobs = 12;
   */
  numPromptLogprobs?: number | undefined;

  /**
   * Only these can be sampled, in any order. Empty: all. Needs FEATURE_TOKEN_CONSTRAINTS. Since
   * 1.2.
   *
   * @generated from field: repeated int32 allowed_token_ids = 13;
   */
  allowedTokenIds: number[];

  /**
   * Sequences of tokens of which none is ever completed: the last token of a sequence cannot be
   * sampled while those before it are the last tokens of the row, prompt and output together; so a
   * sequence of one token never is. None is empty (MALFORMED). Needs FEATURE_TOKEN_CONSTRAINTS.
   * Since 1.2.
   *
   * @generated from field: repeated splitserve.executor.v1.TokenSequence bad_words_token_ids = 14;
   */
  badWordsTokenIds: TokenSequence[];

  /**
   * What the output text must be. Never together with suppressed_token_ids or min_tokens, and only
   * for a model that has end-of-sequence tokens. Needs FEATURE_GRAMMAR (FEATURE_UNSUPPORTED). Since
   * 1.3.
   *
   * @generated from field: splitserve.executor.v1.Grammar grammar = 15;
   */
  grammar?: Grammar | undefined;

  /**
   * All tokens that end the sequence, in 0 .. vocab_size-1: the row takes no other behind one of
   * them in the same step. Told where a row may ever get several tokens in one step. Needs
   * FEATURE_SEVERAL_TOKENS (FEATURE_UNSUPPORTED). Since 1.4.
   *
   * @generated from field: repeated int32 stop_token_ids = 16;
   */
  stopTokenIds: number[];
};

/**
 * Describes the message splitserve.executor.v1.SamplingParams.
 * Use `create(SamplingParamsSchema)` to create a new message.
 */
export const SamplingParamsSchema: GenMessage<SamplingParams> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 14);

/**
 * Some tokens in order. Since 1.2.
 *
 * @generated from message splitserve.executor.v1.TokenSequence
 */
export type TokenSequence = Message<"splitserve.executor.v1.TokenSequence"> & {
  /**
   * In 0 .. vocab_size-1 (TOKEN_OUT_OF_RANGE).
   *
   * @generated from field: repeated int32 token_ids = 1;
   */
  tokenIds: number[];
};

/**
 * Describes the message splitserve.executor.v1.TokenSequence.
 * Use `create(TokenSequenceSchema)` to create a new message.
 */
export const TokenSequenceSchema: GenMessage<TokenSequence> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 15);

/**
 * What the output of a sequence must be: the text of the tokens after num_prompt_tokens. The text of
 * a token is its bytes, by the tokenizer of GetTokenizer; special tokens, and ids that the tokenizer
 * does not have, have none and are never sampled. A token is allowed if the text with it is the
 * beginning of one that the grammar accepts. The model's end-of-sequence tokens are allowed exactly
 * where the grammar accepts the text as it is, so where nothing can follow only they are left. Other
 * tokens that end a sequence, at the client's wish, are text like any other.
 *
 * A step may be under way already when a row samples a token that ends its sequence. Then the
 * executor may answer that step for the row with any status and any token, be it behind an
 * end-of-sequence token that the grammar has accepted; the scheduler discards the row's answer.
 *
 * What a grammar allows depends on the tokens of the sequence alone, which history_token_ids has
 * when a row is added: nothing else need be kept when a row leaves and comes again, here or at
 * another executor.
 *
 * An executor compiles a grammar beside the steps, once for rows with the same one. Until that is
 * done, rows that need it are answered ROW_STATUS_NOT_SAMPLED. One that cannot be compiled, or only
 * with more time or memory than the executor gives it, costs the rows that have it
 * (ROW_STATUS_GRAMMAR_INVALID).
 *
 * Exactly one kind is given, with 1 to 65536 bytes of UTF-8 (of choices: together), and none of its
 * texts is empty (MALFORMED). Since 1.3.
 *
 * @generated from message splitserve.executor.v1.Grammar
 */
export type Grammar = Message<"splitserve.executor.v1.Grammar"> & {
  /**
   * What language the grammar is in.
   *
   * @generated from oneof splitserve.executor.v1.Grammar.kind
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
     * @generated from field: splitserve.executor.v1.Choices choices = 4;
     */
    value: Choices;
    case: "choices";
  } | { case: undefined; value?: undefined };
};

/**
 * Describes the message splitserve.executor.v1.Grammar.
 * Use `create(GrammarSchema)` to create a new message.
 */
export const GrammarSchema: GenMessage<Grammar> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 16);

/**
 * Texts to choose from. Since 1.3.
 *
 * @generated from message splitserve.executor.v1.Choices
 */
export type Choices = Message<"splitserve.executor.v1.Choices"> & {
  /**
   * 1 to 1024 of them.
   *
   * @generated from field: repeated string texts = 1;
   */
  texts: string[];
};

/**
 * Describes the message splitserve.executor.v1.Choices.
 * Use `create(ChoicesSchema)` to create a new message.
 */
export const ChoicesSchema: GenMessage<Choices> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 17);

/**
 * Details of REFUSED and FAILED.
 *
 * @generated from message splitserve.executor.v1.StepError
 */
export type StepError = Message<"splitserve.executor.v1.StepError"> & {
  /**
   * The class of the error, for programs.
   *
   * @generated from field: splitserve.executor.v1.StepErrorReason reason = 1;
   */
  reason: StepErrorReason;

  /**
   * The field at fault, as a path such as `work.row_ids`; empty if none.
   *
   * @generated from field: string field = 2;
   */
  field: string;

  /**
   * For people: the value and what is allowed.
   *
   * @generated from field: string message = 3;
   */
  message: string;
};

/**
 * Describes the message splitserve.executor.v1.StepError.
 * Use `create(StepErrorSchema)` to create a new message.
 */
export const StepErrorSchema: GenMessage<StepError> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 18);

/**
 * The result of one ScheduleBatch. Columns are parallel to `Work.row_ids` unless said otherwise;
 * all are empty unless the status is OK.
 *
 * What is wrong with one row costs that row, which counts as FAILED: a sampled token outside the
 * vocabulary, logprobs that it asked for and that are missing, of another token or position, more
 * than asked for (of a beam search also fewer), not a number or above 0. Scores of rows that did not
 * ask are not looked at. A result of a step that was answered before is ignored. What cannot be laid
 * at a row's door costs the executor, which is given up and may register again: columns of statuses,
 * tokens or offsets that are not as long as the rows of the step make them, and a result of a step
 * that is not the oldest one unanswered.
 *
 * @generated from message splitserve.executor.v1.StepResult
 */
export type StepResult = Message<"splitserve.executor.v1.StepResult"> & {
  /**
   * Of the batch answered.
   *
   * @generated from field: int64 scheduler_epoch = 1;
   */
  schedulerEpoch: bigint;

  /**
   * Of this executor; in an answer WRONG_EXECUTOR_EPOCH, the right one.
   *
   * @generated from field: int64 executor_epoch = 2;
   */
  executorEpoch: bigint;

  /**
   * Of the batch answered.
   *
   * @generated from field: int64 step_id = 3;
   */
  stepId: bigint;

  /**
   * What became of it.
   *
   * @generated from field: splitserve.executor.v1.StepStatus status = 4;
   */
  status: StepStatus;

  /**
   * Set exactly if the status is REFUSED or FAILED.
   *
   * @generated from field: splitserve.executor.v1.StepError error = 5;
   */
  error?: StepError | undefined;

  /**
   * u8 column of RowStatus numbers. Empty: all OK. A row that is not OK has no token, and unless it
   * is NOT_SAMPLED or GRAMMAR_INVALID the contents of the slots it was to write, in cross blocks
   * too, are undefined. The other rows are
   * unaffected, except those that read what the row was to write, in this very step or in a later one
   * that was on its way already: their results are undefined too, whatever their status, and the
   * scheduler, which knows them, discards them.
   * INVALID_LOGITS, FAILED and GRAMMAR_INVALID end the request with an error; after
   * INPUT_UNAVAILABLE it is computed again; after NOT_SAMPLED only its last input token is.
   *
   * @generated from field: bytes row_statuses = 6;
   */
  rowStatuses: Uint8Array;

  /**
   * i32 column: the sampled token, -1 where none was sampled. With `sampled_offsets`: all sampled
   * tokens, those of a row after the other, each row's in their order.
   *
   * @generated from field: bytes sampled_token_ids = 7;
   */
  sampledTokenIds: Uint8Array;

  /**
   * For rows that failed: what to tell people. Never holds prompt text.
   *
   * @generated from field: repeated splitserve.executor.v1.RowError row_errors = 8;
   */
  rowErrors: RowError[];

  /**
   * Logprobs of all sampled tokens, for rows with num_logprobs.
   *
   * @generated from field: splitserve.executor.v1.Logprobs logprobs = 9;
   */
  logprobs?: Logprobs | undefined;

  /**
   * Logprobs of prompt tokens, for rows with num_prompt_logprobs: for each input position p of
   * this step with p + 1 < num_prompt_tokens, the score of the token at p + 1. Rows that are OK or
   * NOT_SAMPLED have them.
   *
   * @generated from field: splitserve.executor.v1.Logprobs prompt_logprobs = 10;
   */
  promptLogprobs?: Logprobs | undefined;

  /**
   * Where the time went.
   *
   * @generated from field: splitserve.executor.v1.StepTimings timings = 11;
   */
  timings?: StepTimings | undefined;

  /**
   * i32 offsets column into `sampled_token_ids`: the tokens of each row, none where none was sampled.
   * Empty: each row has one element there. Present where some row has several. A row that has more
   * than it was allowed, or one behind a token that ends it, counts as FAILED. Since 1.4.
   *
   * @generated from field: bytes sampled_offsets = 12;
   */
  sampledOffsets: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.StepResult.
 * Use `create(StepResultSchema)` to create a new message.
 */
export const StepResultSchema: GenMessage<StepResult> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 19);

/**
 * A sentence about a row that failed.
 *
 * @generated from message splitserve.executor.v1.RowError
 */
export type RowError = Message<"splitserve.executor.v1.RowError"> & {
  /**
   * Index into the rows of the batch.
   *
   * @generated from field: int32 row_index = 1;
   */
  rowIndex: number;

  /**
   * For people.
   *
   * @generated from field: string message = 2;
   */
  message: string;
};

/**
 * Describes the message splitserve.executor.v1.RowError.
 * Use `create(RowErrorSchema)` to create a new message.
 */
export const RowErrorSchema: GenMessage<RowError> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 20);

/**
 * Scores of tokens: natural logarithms of the softmax of the raw logits, before constraints, bias,
 * penalties, temperature and truncation. The first five columns are parallel, ordered by row, then
 * position.
 *
 * @generated from message splitserve.executor.v1.Logprobs
 */
export type Logprobs = Message<"splitserve.executor.v1.Logprobs"> & {
  /**
   * i32 column: index into the rows of the batch.
   *
   * @generated from field: bytes row_indexes = 1;
   */
  rowIndexes: Uint8Array;

  /**
   * i32 column: position in the sequence of the token scored.
   *
   * @generated from field: bytes positions = 2;
   */
  positions: Uint8Array;

  /**
   * i32 column: the token scored.
   *
   * @generated from field: bytes token_ids = 3;
   */
  tokenIds: Uint8Array;

  /**
   * f32 column: its logprob.
   *
   * @generated from field: bytes logprobs = 4;
   */
  logprobs: Uint8Array;

  /**
   * i32 column: its rank; 1 is the most probable (the number of tokens with a larger logit, plus
   * 1).
   *
   * @generated from field: bytes ranks = 5;
   */
  ranks: Uint8Array;

  /**
   * i32 offsets column into the two below.
   *
   * @generated from field: bytes top_offsets = 6;
   */
  topOffsets: Uint8Array;

  /**
   * i32 column: the most probable tokens, best first.
   *
   * @generated from field: bytes top_token_ids = 7;
   */
  topTokenIds: Uint8Array;

  /**
   * f32 column, parallel: their logprobs.
   *
   * @generated from field: bytes top_logprobs = 8;
   */
  topLogprobs: Uint8Array;
};

/**
 * Describes the message splitserve.executor.v1.Logprobs.
 * Use `create(LogprobsSchema)` to create a new message.
 */
export const LogprobsSchema: GenMessage<Logprobs> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 21);

/**
 * Durations of the parts of a step, from the executor's monotonic clock, or its device's. Block moves
 * may go on beside the forward pass, so the parts may add up to more than the step took.
 *
 * @generated from message splitserve.executor.v1.StepTimings
 */
export type StepTimings = Message<"splitserve.executor.v1.StepTimings"> & {
  /**
   * From receipt of the batch to the start of its execution.
   *
   * @generated from field: int64 queue_us = 1;
   */
  queueUs: bigint;

  /**
   * Block moves, to their end on the device.
   *
   * @generated from field: int64 move_us = 2;
   */
  moveUs: bigint;

  /**
   * Input preparation and the forward pass, encoder included, up to the logits; up to the tokens
   * where one recording computes and draws.
   *
   * @generated from field: int64 forward_us = 3;
   */
  forwardUs: bigint;

  /**
   * Sampling, up to tokens on the host.
   *
   * @generated from field: int64 sample_us = 4;
   */
  sampleUs: bigint;
};

/**
 * Describes the message splitserve.executor.v1.StepTimings.
 * Use `create(StepTimingsSchema)` to create a new message.
 */
export const StepTimingsSchema: GenMessage<StepTimings> = /*@__PURE__*/
  messageDesc(file_splitserve_executor_v1_executor, 22);

/**
 * An optional ability of an executor.
 *
 * @generated from enum splitserve.executor.v1.Feature
 */
export enum Feature {
  /**
   * Never sent.
   *
   * @generated from enum value: FEATURE_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * Fills StepResult.logprobs for rows that ask for it.
   *
   * @generated from enum value: FEATURE_LOGPROBS = 1;
   */
  LOGPROBS = 1,

  /**
   * Fills StepResult.prompt_logprobs for rows that ask for it.
   *
   * @generated from enum value: FEATURE_PROMPT_LOGPROBS = 2;
   */
  PROMPT_LOGPROBS = 2,

  /**
   * Applies repetition, presence and frequency penalties (keeps token history of such rows).
   *
   * @generated from enum value: FEATURE_PENALTIES = 3;
   */
  PENALTIES = 3,

  /**
   * Applies logit_bias and min_tokens.
   *
   * @generated from enum value: FEATURE_LOGIT_BIAS = 4;
   */
  LOGIT_BIAS = 4,

  /**
   * Computes rows with adapters (NewRows.adapters). Since 1.1.
   *
   * @generated from enum value: FEATURE_ADAPTERS = 5;
   */
  ADAPTERS = 5,

  /**
   * Serves an encoder-decoder model: encodes the input of a row, and its decoder attends to that
   * (NewRows.cross_block_ids). Since 1.1.
   *
   * @generated from enum value: FEATURE_CROSS_ATTENTION = 6;
   */
  CROSS_ATTENTION = 6,

  /**
   * Applies allowed_token_ids, bad_words_token_ids and a logit_bias of -inf. Since 1.2.
   *
   * @generated from enum value: FEATURE_TOKEN_CONSTRAINTS = 7;
   */
  TOKEN_CONSTRAINTS = 7,

  /**
   * Applies grammars (SamplingParams.grammar). Since 1.3.
   *
   * @generated from enum value: FEATURE_GRAMMAR = 8;
   */
  GRAMMAR = 8,

  /**
   * Reads Work.num_run_on_tokens, Work.draft_token_ids and SamplingParams.stop_token_ids; a row may
   * get several tokens in one step. Since 1.4.
   *
   * @generated from enum value: FEATURE_SEVERAL_TOKENS = 9;
   */
  SEVERAL_TOKENS = 9,
}

/**
 * Describes the enum splitserve.executor.v1.Feature.
 */
export const FeatureSchema: GenEnum<Feature> = /*@__PURE__*/
  enumDesc(file_splitserve_executor_v1_executor, 0);

/**
 * What became of a batch. A number that the scheduler does not know counts as REFUSED.
 *
 * @generated from enum splitserve.executor.v1.StepStatus
 */
export enum StepStatus {
  /**
   * Never sent.
   *
   * @generated from enum value: STEP_STATUS_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * Executed; see the rows.
   *
   * @generated from enum value: STEP_STATUS_OK = 1;
   */
  OK = 1,

  /**
   * Not executed: the executor does not have the base of this delta. The next batch that the
   * scheduler sends after it has read this is a snapshot; deltas already under way are answered
   * alike.
   *
   * @generated from enum value: STEP_STATUS_NEED_SNAPSHOT = 2;
   */
  NEED_SNAPSHOT = 2,

  /**
   * Not executed, nothing changed: the batch breaks the contract. `error` says how.
   *
   * @generated from enum value: STEP_STATUS_REFUSED = 3;
   */
  REFUSED = 3,

  /**
   * Taken, but the computation as a whole failed; `error` says why. No row has a token.
   *
   * @generated from enum value: STEP_STATUS_FAILED = 4;
   */
  FAILED = 4,
}

/**
 * Describes the enum splitserve.executor.v1.StepStatus.
 */
export const StepStatusSchema: GenEnum<StepStatus> = /*@__PURE__*/
  enumDesc(file_splitserve_executor_v1_executor, 1);

/**
 * Why a step was refused or failed.
 *
 * @generated from enum splitserve.executor.v1.StepErrorReason
 */
export enum StepErrorReason {
  /**
   * Never sent.
   *
   * @generated from enum value: STEP_ERROR_REASON_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * A scheduler that has been superseded.
   *
   * @generated from enum value: STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH = 1;
   */
  STALE_SCHEDULER_EPOCH = 1,

  /**
   * Meant for another life of this executor.
   *
   * @generated from enum value: STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH = 2;
   */
  WRONG_EXECUTOR_EPOCH = 2,

  /**
   * A repeat whose result is no longer stored.
   *
   * @generated from enum value: STEP_ERROR_REASON_STALE_STEP = 3;
   */
  STALE_STEP = 3,

  /**
   * Columns whose lengths, offsets or values contradict each other.
   *
   * @generated from enum value: STEP_ERROR_REASON_MALFORMED = 4;
   */
  MALFORMED = 4,

  /**
   * A block id outside its pool, or -1 where a block is needed.
   *
   * @generated from enum value: STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE = 5;
   */
  BLOCK_OUT_OF_RANGE = 5,

  /**
   * A destination named twice, or a block that is source and destination of `copy`.
   *
   * @generated from enum value: STEP_ERROR_REASON_BLOCK_OVERLAP = 6;
   */
  BLOCK_OVERLAP = 6,

  /**
   * A row that is not in the row table.
   *
   * @generated from enum value: STEP_ERROR_REASON_ROW_UNKNOWN = 7;
   */
  ROW_UNKNOWN = 7,

  /**
   * A new row whose id is taken.
   *
   * @generated from enum value: STEP_ERROR_REASON_ROW_EXISTS = 8;
   */
  ROW_EXISTS = 8,

  /**
   * A position outside the row's block table or cross blocks, or not below max_model_len_tokens.
   *
   * @generated from enum value: STEP_ERROR_REASON_POSITION_OUT_OF_RANGE = 9;
   */
  POSITION_OUT_OF_RANGE = 9,

  /**
   * A token id outside the vocabulary.
   *
   * @generated from enum value: STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE = 10;
   */
  TOKEN_OUT_OF_RANGE = 10,

  /**
   * More rows, tokens or adapters than ExecutorLimits allow, or a row id outside
   * 0 .. max_num_rows-1.
   *
   * @generated from enum value: STEP_ERROR_REASON_LIMIT_EXCEEDED = 11;
   */
  LIMIT_EXCEEDED = 11,

  /**
   * A feature that the executor did not announce.
   *
   * @generated from enum value: STEP_ERROR_REASON_FEATURE_UNSUPPORTED = 12;
   */
  FEATURE_UNSUPPORTED = 12,

  /**
   * FAILED only: out of memory.
   *
   * @generated from enum value: STEP_ERROR_REASON_OUT_OF_MEMORY = 13;
   */
  OUT_OF_MEMORY = 13,

  /**
   * FAILED only: anything else; the executor's log has it.
   *
   * @generated from enum value: STEP_ERROR_REASON_INTERNAL = 14;
   */
  INTERNAL = 14,

  /**
   * A scheduler_epoch more than an hour in the future: a clock is wrong. Earlier executors adopted
   * it. The scheduler gives the executor up.
   *
   * @generated from enum value: STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH = 15;
   */
  FUTURE_SCHEDULER_EPOCH = 15,
}

/**
 * Describes the enum splitserve.executor.v1.StepErrorReason.
 */
export const StepErrorReasonSchema: GenEnum<StepErrorReason> = /*@__PURE__*/
  enumDesc(file_splitserve_executor_v1_executor, 2);

/**
 * What became of one row. A number that the scheduler does not know counts as FAILED.
 *
 * @generated from enum splitserve.executor.v1.RowStatus
 */
export enum RowStatus {
  /**
   * Never sent.
   *
   * @generated from enum value: ROW_STATUS_UNSPECIFIED = 0;
   */
  UNSPECIFIED = 0,

  /**
   * Computed; sampled if it was to sample.
   *
   * @generated from enum value: ROW_STATUS_OK = 1;
   */
  OK = 1,

  /**
   * Its logits contain NaN or +inf, or -inf alone, be it by its sampling params. Only rows that
   * sample, or are to return prompt logprobs, have logits.
   *
   * @generated from enum value: ROW_STATUS_INVALID_LOGITS = 2;
   */
  INVALID_LOGITS = 2,

  /**
   * Its input token was to be one that was never sampled; or its grammar has to be brought to where
   * the row is once more, for which it is added anew.
   *
   * @generated from enum value: ROW_STATUS_INPUT_UNAVAILABLE = 3;
   */
  INPUT_UNAVAILABLE = 3,

  /**
   * The computation of this row raised; the other rows were computed without it.
   *
   * @generated from enum value: ROW_STATUS_FAILED = 4;
   */
  FAILED = 4,

  /**
   * All was computed and written as for a row that is OK, prompt logprobs included, but no token was
   * sampled: the row's grammar is still being compiled. The slots of its input tokens are written;
   * those of its drafts, and of tokens that it could have got by running on, are undefined. The scheduler asks again, with the last input
   * token once more, whose slot is then written once more; less and less often where it has nothing
   * else to ask for, and no longer than a minute: then the row counts as FAILED. Only rows that
   * sample and have a grammar, and only until the first token that is sampled for the row since it
   * was added; for another row it counts as FAILED. Since 1.3.
   *
   * @generated from enum value: ROW_STATUS_NOT_SAMPLED = 5;
   */
  NOT_SAMPLED = 5,

  /**
   * All was computed and written as for a row that is OK, but no token can be sampled, now or later:
   * the row's grammar cannot be compiled, or takes more time or memory than the executor gives it,
   * or the output tokens that the row came with do not follow it. Only rows that sample and have a
   * grammar; for another row it counts as FAILED. Since 1.3.
   *
   * @generated from enum value: ROW_STATUS_GRAMMAR_INVALID = 6;
   */
  GRAMMAR_INVALID = 6,
}

/**
 * Describes the enum splitserve.executor.v1.RowStatus.
 */
export const RowStatusSchema: GenEnum<RowStatus> = /*@__PURE__*/
  enumDesc(file_splitserve_executor_v1_executor, 3);

/**
 * The service an executor offers to its scheduler.
 *
 * @generated from service splitserve.executor.v1.ExecutorService
 */
export const ExecutorService: GenService<{
  /**
   * Says what this executor is: the same message that it registers with. No effect; always
   * answers. Errors: none of its own.
   *
   * @generated from rpc splitserve.executor.v1.ExecutorService.GetInfo
   */
  getInfo: {
    methodKind: "unary";
    input: typeof GetInfoRequestSchema;
    output: typeof GetInfoResponseSchema;
  },
  /**
   * Streams the tokenizer files of the model (for example `tokenizer.json`,
   * `tokenizer_config.json`, `chat_template.jinja`), so that neither scheduler nor clients need
   * model files. No effect. The chunks of one file are consecutive and in order.
   * Errors: UNIMPLEMENTED or NOT_FOUND where the executor has no tokenizer; the scheduler then
   * serves token ids only. After any other the executor counts as lost and may register again.
   *
   * @generated from rpc splitserve.executor.v1.ExecutorService.GetTokenizer
   */
  getTokenizer: {
    methodKind: "server_streaming";
    input: typeof GetTokenizerRequestSchema;
    output: typeof GetTokenizerResponseSchema;
  },
  /**
   * Executes steps. One StepResult is returned for each ScheduleBatch, in the order received.
   *
   * At most one stream is live per executor: with the first batch that is taken (identity rule e),
   * or repeats one that was (rule c), a newer stream of the same or a newer scheduler epoch
   * supersedes the older ones, which the executor ends with ABORTED. Until then it is nobody: a
   * stream whose batches are refused changes nothing for the others. A stream
   * that is cut loses nothing: batches that were received are still executed and their results
   * stored; row table, stored results and KV blocks survive until a newer scheduler epoch arrives.
   * When the scheduler half-closes, the executor answers what it has received and ends with OK.
   *
   * Everything wrong *inside* a batch is answered in-band by StepResult.status, and the stream
   * goes on. gRPC errors mean transport or an undecodable stream:
   *   INVALID_ARGUMENT    a message cannot be decoded;
   *   RESOURCE_EXHAUSTED  a message is larger than the executor reads. A scheduler keeps to
   *                       ExecutorLimits.max_message_bytes, so it never sees this;
   *   ABORTED             superseded by a newer stream;
   *   UNAVAILABLE         the executor is shutting down, or went to another scheduler.
   * After any of them the scheduler opens a new stream and repeats what has no result yet; it gives
   * the executor up when that goes on without any result, and its requests move.
   *
   * buf:lint:ignore RPC_REQUEST_STANDARD_NAME
   * buf:lint:ignore RPC_RESPONSE_STANDARD_NAME
   *
   * @generated from rpc splitserve.executor.v1.ExecutorService.Execute
   */
  execute: {
    methodKind: "bidi_streaming";
    input: typeof ScheduleBatchSchema;
    output: typeof StepResultSchema;
  },
}> = /*@__PURE__*/
  serviceDesc(file_splitserve_executor_v1_executor, 0);

