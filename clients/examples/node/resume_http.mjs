// Streams a completion over HTTP with plain `fetch`, and goes on at the next gateway when a
// connection breaks: node resume_http.mjs GATEWAY,GATEWAY... PROMPT
const RETRY_MS = 500;
const MOST_TRIES = 20;

/** Yields the data of each event of one answer once, from whichever gateway it comes. */
export async function* stream(gateways, path, body, headers = {}) {
  let lastEventId = "";
  for (let tries = 0; tries < MOST_TRIES; tries++) {
    const gateway = gateways[tries % gateways.length];
    try {
      const response = await fetch(gateway + path, {
        method: "POST",
        headers: {
          "content-type": "application/json",
          ...headers,
          ...(lastEventId && { "last-event-id": lastEventId }),
        },
        body: JSON.stringify({ ...body, stream: true }),
      });
      const isRefused = response.status < 500 && response.status !== 429;
      if (!response.ok && isRefused) throw new Refused(await response.text());
      if (response.ok) {
        for await (const { id, data } of events(response.body)) {
          if (data === "[DONE]") return;
          const content = JSON.parse(data);
          // A gateway that stops says so in an event without an id.
          if (content.error && content.error.type !== "service_unavailable_error") {
            throw new Refused(data);
          }
          if (content.error) break;
          yield content;
          lastEventId = id;
        }
      }
    } catch (error) {
      if (error instanceof Refused) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  throw new Error(`no gateway answers: ${gateways}`);
}

class Refused extends Error {}

/** Yields the whole events of a body; an event that was cut off is dropped. */
async function* events(body) {
  let text = "";
  for await (const piece of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (text + piece).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/, 2)));
      if (fields.data !== undefined) yield { id: fields.id ?? "", data: fields.data };
    }
  }
}

const [gateways, prompt, body = "{}"] = process.argv.slice(2);
const request = { prompt, ...JSON.parse(body) };
for await (const event of stream(gateways.split(","), "/v1/completions", request)) {
  process.stdout.write(event.choices.map((choice) => choice.text).join(""));
}
