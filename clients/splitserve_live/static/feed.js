// Endless stream of frames from the server: reports failures and reconnects.

const FIRST_PAUSE_MS = 500;
const MAX_PAUSE_MS = 8_000;

export class Feed {
  // Callbacks: `on.frame(frame, isFirst)`, `on.lost(message)`, and `on.refused(message, status)`, after
  // which the feed stops until it gets another key.
  constructor(on) {
    this.on = on;
    this.key = "";
    this.scheduler = "";
    this.abort = null;
  }

  restart() {
    this.abort?.abort();
    this.abort = new AbortController();
    this.run(this.abort.signal);
  }

  stop() {
    this.abort?.abort();
  }

  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  async schedulers() {
    const response = await fetch("schedulers", { headers: this.headers() });
    return response.ok ? (await response.json()).schedulers : [];
  }

  // Returns the scheduler's history of a request; null without one.
  async life(name) {
    const query = new URLSearchParams({ scheduler: this.scheduler, request: name.id });
    const response = await fetch(`life?${query}`, { headers: this.headers() });
    if (!response.ok) return null;
    const { lives } = await response.json();
    return lives.find((life) => life.tenant === name.tenant) ?? null;
  }

  async run(signal) {
    let pauseMs = FIRST_PAUSE_MS;
    while (!signal.aborted) {
      let problem = "the scheduler ended the connection";
      try {
        const response = await fetch(`feed?scheduler=${encodeURIComponent(this.scheduler)}`, {
          headers: this.headers(),
          signal,
        });
        if (response.status === 401 || response.status === 403) {
          this.on.refused(await messageOf(response), response.status);
          return;
        }
        if (!response.ok) throw new Error(await messageOf(response));
        let isFirst = true;
        for await (const frame of frames(response.body)) {
          if (signal.aborted) return;
          this.on.frame(frame, isFirst);
          isFirst = false;
          pauseMs = FIRST_PAUSE_MS;
        }
      } catch (error) {
        if (signal.aborted) return;
        // Each browser has its own message for a server that does not answer.
        problem = error instanceof TypeError ? "the gateway does not answer" : error.message;
      }
      this.on.lost(problem);
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
      pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
    }
  }
}

// Returns the reason of a refusal; for a proxy, which gives none, the HTTP status.
async function messageOf(response) {
  const body = await response.json().catch(() => null);
  return body?.message ?? `the answer was HTTP ${response.status}`;
}

async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    rest.push(lines[0]);
    for (let index = 1; index < lines.length; index++) {
      yield JSON.parse(rest.join(""));
      rest = [lines[index]];
    }
  }
}
