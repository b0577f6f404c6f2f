// Checks of promptfoo with its provider for OpenAI's API: `node FILE URL`.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import promptfoo from 'promptfoo'

const TEXT = 'The fox jumps over Ünïts {°}.'
const url = process.argv[2]

async function evaluated(kind, said) {
  const summary = await promptfoo.evaluate(
    {
      prompts: ['Please. [[[{{said}}]]]'],
      providers: [
        { id: `openai:${kind}:fake`, config: { apiBaseUrl: `${url}/v1`, apiKey: 'none' } },
      ],
      tests: [{ vars: { said }, assert: [{ type: 'equals', value: said }] }],
      writeLatestResults: false,
    },
    { cache: false, showProgressBar: false },
  )
  return summary.results[0] ?? (await summary.toEvaluateSummary()).results[0]
}

const checks = {
  async chat() {
    const result = await evaluated('chat', TEXT)
    assert.ok(result.success, result.error)
    assert.equal(result.response.output, TEXT)
  },

  async completion() {
    const result = await evaluated('completion', TEXT)
    assert.ok(result.success, result.error)
  },

  async error() {
    const result = await evaluated('chat', 'fox '.repeat(20_000))
    assert.match(result.error, /This model's maximum context length is/)
  },
}

const { version } = JSON.parse(
  readFileSync(new URL('node_modules/promptfoo/package.json', import.meta.url)),
)
process.stdout.write(`\n["check", "version", ${JSON.stringify(version)}]\n`)
for (const [name, check] of Object.entries(checks)) {
  const problem = await check().then(() => '', (error) => error.stack)
  process.stdout.write(`\n["check", ${JSON.stringify(name)}, ${JSON.stringify(problem)}]\n`)
}
process.exit(0)
