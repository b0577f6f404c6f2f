// Checks of Claude Code, Anthropic's agent for terminals: `node FILE URL`.
import assert from 'node:assert/strict'
import { execFile, execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const TEXT = 'The fox jumps over Ünïts {°}.'
const url = process.argv[2]
const modules = fileURLToPath(new URL('node_modules', import.meta.url))
const home = mkdtempSync(join(tmpdir(), 'claude-'))

// It puts the program for this machine into its place.
execFileSync(process.execPath, [join(modules, '@anthropic-ai', 'claude-code', 'install.cjs')])

// Nothing of the user's own settings, and nothing but requests for messages.
const env = {
  PATH: process.env.PATH,
  HOME: home,
  ANTHROPIC_BASE_URL: url,
  ANTHROPIC_API_KEY: 'none',
  ANTHROPIC_MODEL: 'fake',
  ANTHROPIC_SMALL_FAST_MODEL: 'fake',
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
  IS_SANDBOX: '1',
}

function asked(prompt, ...options) {
  const flags = ['--print', '--dangerously-skip-permissions', ...options, prompt]
  return new Promise((resolve) => {
    const done = (_, output, problems) => resolve({ output, problems })
    const child = execFile(join(modules, '.bin', 'claude'), flags, { cwd: home, env }, done)
    child.stdin.end()
  })
}

async function events(prompt) {
  const flags = ['--output-format', 'stream-json', '--include-partial-messages', '--verbose']
  const { output } = await asked(prompt, ...flags)
  return output.trim().split('\n').map((line) => JSON.parse(line))
}

const checks = {
  async chat() {
    const { output, problems } = await asked(`Please. [[[${TEXT}]]]`)
    assert.equal(output.trim(), TEXT, problems)
  },

  async stream() {
    const seen = await events(`Please. [[[${TEXT}]]]`)
    const deltas = seen.flatMap(({ event }) => event?.delta?.text ?? [])
    assert.ok(deltas.length > 3, `${deltas.length} deltas`)
    assert.equal(deltas.join(''), TEXT)
  },

  async tools() {
    const call = { name: 'Bash', arguments: { command: 'echo $((6 * 7))', description: 'Count' } }
    const called = `I count.<tool_call>${JSON.stringify(call)}</tool_call>`
    const seen = await events(`How many? [[[${called}|||There are {result}.]]]`)
    const { result, num_turns } = seen.at(-1)
    assert.equal(result, 'There are 42.')
    assert.equal(num_turns, 2)
  },

  async error() {
    const { output } = await asked('fox '.repeat(20_000))
    assert.match(output, /Prompt is too long/)
  },
}

const { version } = JSON.parse(
  readFileSync(join(modules, '@anthropic-ai', 'claude-code', 'package.json')),
)
process.stdout.write(`\n["check", "version", ${JSON.stringify(version)}]\n`)
for (const [name, check] of Object.entries(checks)) {
  const problem = await check().then(() => '', (error) => error.stack)
  process.stdout.write(`\n["check", ${JSON.stringify(name)}, ${JSON.stringify(problem)}]\n`)
}
process.exit(0)
