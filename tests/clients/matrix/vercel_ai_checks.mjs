// Checks of Vercel's AI SDK with its provider for servers like OpenAI's: `node FILE URL`.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { z } from 'zod'

const TEXT = 'The fox jumps over Ünïts {°}.'
const ASKS_WEATHER =
  '[[[<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>|||' +
  'It says: {result}]]]'
const WEATHER = { city: 'Oslo', celsius: 1.5 }

const url = process.argv[2]
const provider = createOpenAICompatible({
  name: 'splitserve',
  baseURL: `${url}/v1`,
  apiKey: 'none',
  includeUsage: true,
  supportsStructuredOutputs: true,
})
const model = provider('fake')
const tools = {
  get_weather: tool({
    description: 'Weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `rain in ${city}`,
  }),
}

async function numAborted() {
  const { text } = await generateText({ model, prompt: '[[[{aborted}]]]' })
  return Number(text)
}

const checks = {
  async chat() {
    const answer = await generateText({ model, prompt: `[[[${TEXT}]]]` })
    assert.equal(answer.text, TEXT)
    assert.ok(answer.usage.outputTokens > 1)
  },

  async stream() {
    const pieces = []
    const answer = streamText({ model, prompt: `[[[${TEXT}]]]` })
    for await (const piece of answer.textStream) pieces.push(piece)
    assert.ok(pieces.length > 1)
    assert.equal(pieces.join(''), TEXT)
  },

  async tools() {
    const options = { model, tools, prompt: ASKS_WEATHER, stopWhen: stepCountIs(3) }
    assert.equal((await generateText(options)).text, 'It says: rain in Oslo')
    const streamed = streamText(options)
    await streamed.consumeStream()
    assert.equal(await streamed.text, 'It says: rain in Oslo')
  },

  async structured() {
    const schema = z.object({ city: z.string(), celsius: z.number() })
    const answer = await generateText({
      model,
      prompt: `[[[${JSON.stringify(WEATHER)}]]]`,
      output: Output.object({ schema }),
    })
    assert.deepEqual(answer.output, WEATHER)
  },

  async error() {
    const asked = generateText({ model, prompt: 'fox '.repeat(20_000), maxRetries: 0 })
    await assert.rejects(asked, (error) => {
      assert.equal(error.name, 'AI_APICallError')
      assert.equal(error.statusCode, 400)
      assert.match(error.message, /This model's maximum context length is/)
      return true
    })
  },

  async cancel() {
    const before = await numAborted()
    const aborter = new AbortController()
    const answer = streamText({
      model,
      prompt: '[[[The fox{hold}]]]',
      abortSignal: aborter.signal,
      onError() {},
    })
    for await (const _ of answer.textStream) aborter.abort()
    const giveUp = Date.now() + 30_000
    while ((await numAborted()) <= before) assert.ok(Date.now() < giveUp, 'not aborted')
  },
}

const { version } = JSON.parse(readFileSync(new URL('node_modules/ai/package.json', import.meta.url)))
process.stdout.write(`\n["check", "version", ${JSON.stringify(version)}]\n`)
for (const [name, check] of Object.entries(checks)) {
  const problem = await check().then(() => '', (error) => error.stack)
  process.stdout.write(`\n["check", ${JSON.stringify(name)}, ${JSON.stringify(problem)}]\n`)
}
process.exit(0)
