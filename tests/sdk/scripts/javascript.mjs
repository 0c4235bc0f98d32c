// Checks of E2B's JavaScript SDK against a whole installation: one JSON line per check.

import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { main, until } from './harness.mjs'

const require = createRequire(process.env.NODE_CLIENTS + '/package.json')
const { Sandbox, CommandExitError, NotFoundError, TimeoutError } = require('e2b')

const CHECKS = {
  async 'create, inspect and kill'() {
    const box = await Sandbox.create({ timeoutMs: 600_000, metadata: { user: 'ada' }, envs: { COLOUR: 'blue' } })
    assert.ok(await box.isRunning())
    const info = await box.getInfo()
    assert.deepEqual(info.metadata, { user: 'ada' })
    assert.equal(info.state, 'running')
    assert.equal((await box.commands.run('echo $COLOUR')).stdout, 'blue\n')
    assert.equal(await box.kill(), true)
    assert.equal(await Sandbox.kill(box.sandboxId), false)
    assert.equal(await box.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
  },
  async commands() {
    const box = await Sandbox.create()
    const done = await box.commands.run('echo out; echo err >&2')
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\n', 'err\n', 0])
    await assert.rejects(box.commands.run('exit 7'), (error) => error instanceof CommandExitError && error.exitCode === 7)
    await assert.rejects(box.commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
    const reader = await box.commands.run('read line; echo got $line', { background: true, stdin: true })
    await box.commands.sendStdin(reader.pid, 'hello\n')
    assert.equal((await reader.wait()).stdout, 'got hello\n')
    const sleeper = await box.commands.run('sleep 100', { background: true, timeoutMs: 0 })
    assert.ok((await box.commands.list()).some((process) => process.pid === sleeper.pid))
    assert.equal(await box.commands.kill(sleeper.pid), true)
    await assert.rejects(sleeper.wait(), (error) => error.exitCode === -1)
    const many = await Promise.all([...Array(20).keys()].map((n) => box.commands.run(`echo ${n}`)))
    assert.deepEqual(many.map((item) => item.stdout), [...Array(20).keys()].map((n) => `${n}\n`))
    await box.kill()
  },
  async 'files and watching'() {
    const box = await Sandbox.create()
    await box.files.write('deep/a.txt', 'grüße')
    assert.equal(await box.files.read('deep/a.txt'), 'grüße')
    await box.files.write('empty', '')
    assert.equal(await box.files.read('empty'), '')
    const blob = new Uint8Array(500_000).map((_, index) => index % 256)
    await box.files.write('blob', blob.buffer)
    assert.deepEqual(await box.files.read('blob', { format: 'bytes' }), blob)
    assert.equal(await box.files.makeDir('new'), true)
    assert.equal(await box.files.makeDir('new'), false)
    await box.files.rename('empty', 'new/renamed')
    assert.deepEqual((await box.files.list('new')).map((entry) => entry.name), ['renamed'])
    await box.files.remove('new')
    assert.equal(await box.files.exists('new'), false)
    await assert.rejects(box.files.read('nothing'), NotFoundError)
    const seen = []
    const handle = await box.files.watchDir('deep', (event) => seen.push(`${event.name} ${event.type}`))
    await box.files.write('deep/b.txt', 'x')
    await until(() => seen.length >= 3)
    assert.deepEqual(seen, ['b.txt create', 'b.txt chmod', 'b.txt write'])
    await handle.stop()
    await box.kill()
  },
  async terminals() {
    const box = await Sandbox.create()
    let shown = ''
    const terminal = await box.pty.create({ cols: 100, rows: 30, onData: (data) => { shown += Buffer.from(data) } })
    await box.pty.resize(terminal.pid, { cols: 90, rows: 25 })
    await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
    await terminal.wait()
    assert.match(shown, /25 90/)
    await box.kill()
  },
  async 'lists with pages and filters'() {
    const mark = `a b&c=d/${Date.now()}`
    const boxes = []
    for (let n = 0; n < 3; n++) boxes.push(await Sandbox.create({ metadata: { mark } }))
    const pager = Sandbox.list({ query: { metadata: { mark } }, limit: 2 })
    const pages = []
    while (pager.hasNext) pages.push((await pager.nextItems()).map((item) => item.sandboxId))
    assert.deepEqual(pages.map((page) => page.length), [2, 1])
    await boxes[0].pause()
    const paused = Sandbox.list({ query: { metadata: { mark }, state: ['paused'] } })
    assert.deepEqual((await paused.nextItems()).map((item) => item.sandboxId), [boxes[0].sandboxId])
    await Promise.all(boxes.map((box) => box.kill()))
  },
  async 'pause and connect'() {
    const box = await Sandbox.create()
    const sleeper = await box.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    await box.files.write('kept.txt', 'kept')
    assert.equal(await box.pause(), true)
    assert.equal(await box.pause(), false)
    assert.equal((await Sandbox.getInfo(box.sandboxId)).state, 'paused')
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal(await again.files.read('kept.txt'), 'kept')
    assert.ok((await again.commands.list()).some((process) => process.pid === sleeper.pid))
    await again.kill()
  },
  async 'auto-pause and timeouts'() {
    const box = await Sandbox.create({ lifecycle: { onTimeout: 'pause' }, timeoutMs: 600_000 })
    await box.setTimeout(1000)
    await until(async () => (await Sandbox.getInfo(box.sandboxId)).state === 'paused')
    await Sandbox.connect(box.sandboxId, { timeoutMs: 600_000 })
    assert.equal((await box.commands.run('echo back')).stdout, 'back\n')
    await box.kill()
    const began = Date.now()
    const short = await Sandbox.create({ timeoutMs: 4000 }).catch((error) => {
      // A stalled machine may not hand the sandbox out before its timeout.
      if (Date.now() - began < 3000) throw error
      return Sandbox.create({ timeoutMs: 30_000 })
    })
    await until(async () => !(await short.isRunning()))
  },
  async 'snapshot and fork'() {
    const box = await Sandbox.create()
    await box.files.write('state.txt', 'one')
    const snapshot = await box.createSnapshot()
    const clone = await Sandbox.create(snapshot.snapshotId)
    assert.equal(await clone.files.read('state.txt'), 'one')
    const forks = await box.fork({ count: 2, timeoutMs: 600_000 })
    for (const fork of forks) assert.equal(await fork.files.read('state.txt'), 'one')
    await Promise.all([box, clone, ...forks].map((item) => item.kill()))
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  },
  async metrics() {
    const box = await Sandbox.create()
    const found = await until(async () => { const samples = await box.getMetrics(); return samples.length ? samples : null })
    assert.equal(found[0].cpuCount, 2)
    await box.kill()
  },
}

await main(CHECKS, 3)
