// Checks of E2B's code interpreter SDK for JavaScript against a whole installation.

import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { main } from './harness.mjs'

const require = createRequire(process.env.NODE_CLIENTS + '/package.json')
const { Sandbox, TimeoutError } = require('@e2b/code-interpreter')

async function withBox(use, options = {}) {
  const box = await Sandbox.create(options)
  try {
    await use(box)
  } finally {
    await box.kill()
  }
}

async function text(box, code, options = {}) {
  const done = await box.runCode(code, options)
  assert.equal(done.error, undefined, done.error?.traceback)
  return done.text
}

const CHECKS = {
  async 'every language keeps its state'() {
    await withBox(async (box) => {
      for (const [language, first, second] of [
        ['python', 'x = 41', 'x + 1'],
        ['js', 'const x = 6', 'x * 7'],
        ['ts', 'const x: number = 84', 'x / 2 as number'],
      ]) {
        await text(box, first, { language })
        assert.equal(await text(box, second, { language }), '42', language)
      }
      await box.runCode('x=42', { language: 'bash' })
      assert.deepEqual((await box.runCode('echo $x', { language: 'bash' })).logs.stdout, ['42\n'])
    })
  },
  async 'charts and tables'() {
    await withBox(async (box) => {
      const drawn = await box.runCode('import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4])\nplt.show()')
      assert.equal(drawn.results[0].chart.type, 'line')
      assert.deepEqual(drawn.results[0].chart.elements[0].points, [[1, 3], [2, 4]])
      assert.ok(Buffer.from(drawn.results[0].png, 'base64').subarray(1, 4).equals(Buffer.from('PNG')))
      const table = await box.runCode("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
      assert.match(table.results[0].html, /<table/)
      assert.deepEqual(table.results[0].data, { a: [1, 2] })
    })
  },
  async 'contexts, variables and errors'() {
    await withBox(async (box) => {
      await text(box, 'x = 1')
      const context = await box.createCodeContext({ cwd: '/tmp' })
      assert.equal((await box.runCode('x', { context })).error.name, 'NameError')
      assert.equal(await text(box, 'import os; os.getcwd()', { context }), '/tmp')
      await box.restartCodeContext(context)
      await box.removeCodeContext(context)
      assert.ok(!(await box.listCodeContexts()).some((item) => item.id === context.id))
      const code = "import os; os.environ['STAGE'], os.environ.get('OWN')"
      assert.equal(await text(box, code, { envs: { OWN: 'o' } }), "('test', 'o')")
      assert.equal(await text(box, code), "('test', None)")
    }, { envs: { STAGE: 'test' } })
  },
  async 'callbacks and a timeout'() {
    await withBox(async (box) => {
      const seen = []
      await box.runCode("print('out')\nimport sys\nprint('err', file=sys.stderr)\ndisplay(1)\n1 / 0", {
        onStdout: (item) => seen.push(['out', item.line]),
        onStderr: (item) => seen.push(['err', item.line]),
        onResult: (item) => seen.push(['result', item.text]),
        onError: (item) => seen.push(['error', item.name]),
      })
      assert.deepEqual(seen.sort(), [
        ['err', 'err\n'], ['error', 'ZeroDivisionError'], ['out', 'out\n'], ['result', '1'],
      ])
      await assert.rejects(box.runCode('while True: pass', { timeoutMs: 2000 }), TimeoutError)
      assert.equal(await text(box, '1 + 1'), '2')
    })
  },
  async 'a run wakes a paused sandbox'() {
    await withBox(async (box) => {
      await text(box, 'kept = 7')
      await box.pause()
      assert.equal(await text(box, 'kept'), '7')
    }, { lifecycle: { onTimeout: 'pause', autoResume: true } })
  },
}

await main(CHECKS, 3)
