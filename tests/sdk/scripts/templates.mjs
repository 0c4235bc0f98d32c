// Checks of template builds with E2B's JavaScript SDK against a whole installation: one JSON line per check.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { mkdtempSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { main } from './harness.mjs'

const require = createRequire(process.env.NODE_CLIENTS + '/package.json')
const { Sandbox, Template, BuildError, waitForURL } = require('e2b')

const newName = () => `sdk-${randomUUID().slice(0, 13)}`

async function build(template, name = newName(), options = {}) {
  const logs = []
  const made = await Template.build(template, name, {
    cpuCount: 1, memoryMB: 1024, onBuildLogs: (entry) => logs.push(entry.message), ...options,
  })
  return { made, name, logs }
}

const CHECKS = {
  async 'a template with files and a server is built and used'() {
    const directory = mkdtempSync(join(tmpdir(), 'context'))
    mkdirSync(join(directory, 'folder'))
    writeFileSync(join(directory, 'folder', 'test.txt'), 'This is a test file.')
    symlinkSync('test.txt', join(directory, 'folder', 'symlink.txt'))
    symlinkSync('nothing.txt', join(directory, 'folder', 'broken.txt'))
    const template = Template({ fileContextPath: directory })
      .fromTemplate('base')
      .copy('folder/*', '/app/folder', { forceUpload: true })
      .setWorkdir('/app')
      .runCmd('cat folder/symlink.txt')
      .setStartCmd('python3 -m http.server 8124', waitForURL('http://localhost:8124/'))
    const { name, logs } = await build(template).finally(() => rmSync(directory, { recursive: true }))
    assert.ok(logs.some((line) => line.includes('[stdout]: This is a test file.')), logs.join('\n'))
    const box = await Sandbox.create(name)
    const done = await box.commands.run('curl -sf http://localhost:8124/folder/test.txt')
    assert.equal(done.stdout, 'This is a test file.')
    await box.kill()
  },
  async 'an unknown user fails the build with its name'() {
    const template = Template().fromImage('base').runCmd('whoami', { user: 'root123' })
    await assert.rejects(build(template), (error) => {
      assert.ok(error instanceof BuildError)
      assert.equal(
        error.message,
        "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
      )
      return true
    })
  },
  async 'tags and names'() {
    const name = newName()
    assert.equal(await Template.exists(name), false)
    const { made } = await build(Template().fromImage('base').runCmd('echo js > made'), `${name}:v1`)
    assert.equal(await Template.exists(name), true)
    const assigned = await Template.assignTags(`${name}:v1`, ['stable'])
    assert.equal(assigned.buildId, made.buildId)
    await Template.removeTags(name, 'v1')
    assert.deepEqual((await Template.getTags(name)).map((item) => item.tag), ['stable'])
    const box = await Sandbox.create(`${name}:stable`)
    assert.equal(await box.files.read('made'), 'js\n')
    await box.kill()
  },
  async 'a background build'() {
    const template = Template().fromImage('base').skipCache().runCmd('sleep 3')
    const made = await Template.buildInBackground(template, newName(), { cpuCount: 1, memoryMB: 1024 })
    let status = await Template.getBuildStatus(made, { logsOffset: 0 })
    assert.equal(status.status, 'building')
    while (status.status === 'building') {
      await new Promise((resolve) => setTimeout(resolve, 200))
      status = await Template.getBuildStatus(made, { logsOffset: 0 })
    }
    assert.equal(status.status, 'ready')
  },
}

await main(CHECKS, 2)
