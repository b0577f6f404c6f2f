// A real scheduler with a fake executor, by tests/support/processes/stdio_service.py.

import assert from "node:assert/strict";
import { spawn, type ChildProcessWithoutNullStreams } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

import type { Completion, SamplingParams } from "splitserve";

// From build/support of the package, unless that is a copy somewhere else.
export const ROOT =
  process.env["REPOSITORY"] ?? fileURLToPath(new URL("../../../../", import.meta.url));
export const PYTHON = process.env["PYTHON"] ?? join(ROOT, ".venv", "bin", "python");
const LAST_WORDS = 20_000;

/** What a client must get of a sequence. */
export type Expected = Pick<Completion, "index" | "tokenIds" | "reason"> & Partial<Completion>;

export class FakeService {
  readonly #process: ChildProcessWithoutNullStreams;
  readonly #lines: AsyncIterator<string>;
  #said = "";
  address = "";
  /** The same service, through a network that `cut` breaks. */
  proxy = "";

  private constructor() {
    const module = "tests.support.processes.stdio_service";
    this.#process = spawn(PYTHON, ["-m", module], { cwd: ROOT });
    this.#lines = createInterface({ input: this.#process.stdout })[Symbol.asyncIterator]();
    this.#process.stderr.on("data", (data) => {
      this.#said = (this.#said + String(data)).slice(-LAST_WORDS);
    });
  }

  static async start(): Promise<FakeService> {
    const service = new FakeService();
    Object.assign(service, await service.#read());
    return service;
  }

  /** Ends it; fails if an executor was asked to read what is not there. */
  async stop(): Promise<void> {
    const ended = once(this.#process, "exit");
    this.#process.stdin.end();
    const [code] = await ended;
    assert.equal(code, 0, this.#said);
  }

  async do(name: string, values: object = {}): Promise<unknown> {
    this.#process.stdin.write(JSON.stringify({ do: name, ...values }) + "\n");
    const { result, error } = (await this.#read()) as { result?: unknown; error?: string };
    assert.equal(error, undefined);
    return result;
  }

  /** `params` give seed and maxTokens. */
  async expect(prompt: readonly number[], params: SamplingParams): Promise<Expected[]> {
    const values = { prompt, params: { ...toPython(params), seed: String(params.seed) } };
    return fromPython(await this.do("expect", values)) as Expected[];
  }

  /** Waits until all requests are over, which takes fewer steps than `most` from now. */
  async endsBefore(most: number): Promise<void> {
    const before = (await this.do("count_steps")) as number;
    await this.do("release");
    await this.do("wait_idle");
    const numSteps = ((await this.do("count_steps")) as number) - before;
    assert.ok(numSteps < most, `${numSteps} steps`);
  }

  async #read(): Promise<unknown> {
    const { value, done } = await this.#lines.next();
    assert.ok(!done, `the service has ended: ${this.#said}`);
    return JSON.parse(value);
  }
}

/** Names in camelCase to snake_case, inside of objects as well. */
function toPython(values: object): Record<string, unknown> {
  const entries = Object.entries(values).map(([name, value]) => [
    name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`),
    isPlainObject(value) ? toPython(value) : typeof value === "bigint" ? String(value) : value,
  ]);
  return Object.fromEntries(entries);
}

/** The other way round; what is null, or a list without entries, is left out. */
function fromPython(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(fromPython);
  if (!isPlainObject(value)) return value;
  const entries = Object.entries(value)
    .filter(([, each]) => each !== null && !(Array.isArray(each) && each.length === 0))
    .map(([name, each]) => [
      name.replace(/_(.)/g, (_, letter) => letter.toUpperCase()),
      fromPython(each),
    ]);
  return Object.fromEntries(entries);
}

function isPlainObject(value: unknown): value is object {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
