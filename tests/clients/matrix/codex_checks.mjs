// Checks of Codex, OpenAI's agent for terminals, with the Responses API: `node FILE URL`.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const TEXT = 'The fox jumps over Ünïts {°}.'
const url = process.argv[2]
const modules = fileURLToPath(new URL('node_modules', import.meta.url))
const home = mkdtempSync(join(tmpdir(), 'codex-'))
const env = { PATH: process.env.PATH, HOME: home, CODEX_HOME: home, OPENAI_API_KEY: 'none' }

writeFileSync(
  join(home, 'config.toml'),
  `model = "fake"
model_provider = "own"
[model_providers.own]
name = "own"
base_url = "${url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
`,
)

function asked(prompt) {
  const flags = ['--skip-git-repo-check', '--dangerously-bypass-approvals-and-sandbox', '--json']
  return new Promise((resolve) => {
    const done = (_, output, problems) => resolve({ output, problems })
    const command = ['exec', ...flags, prompt]
    const child = execFile(join(modules, '.bin', 'codex'), command, { cwd: home, env }, done)
    child.stdin.end()
  })
}

async function items(prompt) {
  const { output, problems } = await asked(prompt)
  const events = output.trim().split('\n').map((line) => JSON.parse(line))
  const done = events.filter(({ type }) => type === 'item.completed').map(({ item }) => item)
  return { done, problems: problems + output }
}

const checks = {
  async chat() {
    const { done, problems } = await items(`Please. [[[${TEXT}]]]`)
    assert.equal(done.at(-1)?.text, TEXT, problems)
  },

  async tools() {
    const call = { name: 'exec_command', arguments: { cmd: 'echo $((6 * 7))' } }
    const called = `I count.<tool_call>${JSON.stringify(call)}</tool_call>`
    const { done, problems } = await items(`How many? [[[${called}|||There are {result}.]]]`)
    assert.ok(done.some(({ aggregated_output }) => aggregated_output === '42\n'), problems)
    assert.match(done.at(-1).text, /^There are [^]*42\s*\.$/, problems)
  },

  async error() {
    const { output } = await asked('fox '.repeat(20_000))
    assert.match(output, /This model's maximum context length is|context window/)
  },
}

const { version } = JSON.parse(readFileSync(join(modules, '@openai', 'codex', 'package.json')))
process.stdout.write(`\n["check", "version", ${JSON.stringify(version)}]\n`)
for (const [name, check] of Object.entries(checks)) {
  const problem = await check().then(() => '', (error) => error.stack)
  process.stdout.write(`\n["check", ${JSON.stringify(name)}, ${JSON.stringify(problem)}]\n`)
}
process.exit(0)
