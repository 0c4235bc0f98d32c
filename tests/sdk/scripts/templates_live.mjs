// The cases of E2B's own live tests of template builds, with the image names that these use.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { mkdtempSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { main } from './harness.mjs'

const require = createRequire(process.env.NODE_CLIENTS + '/package.json')
const { BuildError, Template, TemplateError, waitForTimeout } = require('e2b')

const UBUNTU = 'ubuntu:22.04'
const newName = () => `live-${randomUUID().slice(0, 13)}`

async function build(template, name = newName(), options = {}) {
  const logs = []
  const made = await Template.build(template, name, {
    cpuCount: 1, memoryMB: 1024, onBuildLogs: (entry) => logs.push(entry.message), ...options,
  })
  return { made, name, logs }
}

// Builds from a directory with a file and links to it: relative, absolute and broken.
async function inFolder(make) {
  const directory = mkdtempSync(join(tmpdir(), 'context'))
  const inside = join(directory, 'folder')
  mkdirSync(inside)
  writeFileSync(join(inside, 'test.txt'), 'This is a test file.')
  symlinkSync('test.txt', join(inside, 'symlink.txt'))
  symlinkSync(join(inside, 'test.txt'), join(inside, 'absolute.txt'))
  symlinkSync('nothing.txt', join(inside, 'broken.txt'))
  try {
    const { logs } = await build(make(Template({ fileContextPath: directory })))
    return logs
  } finally {
    rmSync(directory, { recursive: true })
  }
}

const CHECKS = {
  async build_template() {
    const logs = await inFolder((template) =>
      template
        .fromBaseImage()
        .copy('folder/*', 'folder', { forceUpload: true })
        .runCmd('cat folder/test.txt')
        .setWorkdir('/app')
        .setStartCmd('echo "Hello, world!"', waitForTimeout(10_000)),
    )
    assert.ok(logs.some((line) => line.includes('[stdout]: This is a test file.')), logs.join('\n'))
    assert.ok(logs.some((line) => line.includes('[start] [stdout]: Hello, world!')), logs.join('\n'))
  },
  async build_template_from_base_template() {
    await build(Template().fromTemplate('base'), newName(), { skipCache: true })
  },
  async build_template_with_symlinks() {
    const logs = await inFolder((template) =>
      template
        .fromImage(UBUNTU)
        .skipCache()
        .copy('folder/*', 'folder', { forceUpload: true })
        .runCmd('cat folder/symlink.txt && test -L folder/broken.txt'),
    )
    assert.ok(logs.some((line) => line.includes('[stdout]: This is a test file.')), logs.join('\n'))
  },
  async build_template_with_resolve_symlinks() {
    await inFolder((template) =>
      template
        .fromImage(UBUNTU)
        .skipCache()
        .copy('folder/symlink.txt', 'folder/symlink.txt', {
          forceUpload: true, resolveSymlinks: true,
        })
        .runCmd('cat folder/symlink.txt && test ! -L folder/symlink.txt'),
    )
  },
  async build_in_background() {
    const template = Template().fromImage(UBUNTU).skipCache().runCmd('sleep 5').runCmd('echo done')
    const made = await Template.buildInBackground(template, newName(), { cpuCount: 1, memoryMB: 1024 })
    let status = await Template.getBuildStatus(made, { logsOffset: 0 })
    assert.equal(status.status, 'building')
    while (status.status === 'building') {
      await new Promise((resolve) => setTimeout(resolve, 200))
      status = await Template.getBuildStatus(made, { logsOffset: 0 })
    }
    assert.equal(status.status, 'ready')
  },
  async make_symlink() {
    await build(
      Template()
        .fromImage(UBUNTU)
        .skipCache()
        .makeSymlink('.bashrc', '.bashrc.local')
        .runCmd('test "$(readlink .bashrc.local)" = ".bashrc"'),
    )
  },
  async make_symlink_force() {
    await build(
      Template()
        .fromImage(UBUNTU)
        .makeSymlink('.bashrc', '.bashrc.local')
        .skipCache()
        .makeSymlink('.bashrc', '.bashrc.local', { force: true })
        .runCmd('test "$(readlink .bashrc.local)" = ".bashrc"'),
    )
  },
  async run_command() {
    await build(Template().fromImage(UBUNTU).skipCache().runCmd('ls -l'))
  },
  async run_command_as_a_different_user() {
    await build(
      Template().fromImage(UBUNTU).skipCache().runCmd('test "$(whoami)" = "root"', { user: 'root' }),
    )
  },
  async run_command_as_a_user_that_does_not_exist() {
    const template = Template().fromImage(UBUNTU).skipCache().runCmd('whoami', { user: 'root123' })
    await assert.rejects(build(template), (error) => {
      assert.ok(error instanceof BuildError)
      assert.equal(
        error.message,
        "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
      )
      return true
    })
  },
  async tags_are_assigned_and_removed() {
    const tag = `v1-${randomUUID()}`
    const { made, name } = await build(Template().fromBaseImage(), `${newName()}:${tag}`)
    assert.ok(made.buildId && made.templateId)
    const alias = name.split(':')[0]
    const assigned = await Template.assignTags(name, ['production', 'latest'])
    assert.ok(assigned.tags.includes('production') && assigned.tags.includes('latest'))
    await Template.removeTags(alias, 'production')
    const left = (await Template.getTags(alias)).map((item) => item.tag)
    assert.deepEqual(left.sort(), ['latest', tag])
  },
  async a_single_tag_is_assigned() {
    const { name } = await build(Template().fromBaseImage(), `${newName()}:v1-${randomUUID()}`)
    const assigned = await Template.assignTags(name, 'stable')
    assert.ok(assigned.buildId)
    assert.ok(assigned.tags.includes('stable'))
    await Template.removeTags(name.split(':')[0], 'stable')
  },
  async a_tag_without_a_name_is_refused() {
    await assert.rejects(Template.assignTags(':v1.0', ['production']), TemplateError)
  },
  async a_name_without_a_tag_is_refused() {
    await assert.rejects(Template.assignTags(`${newName()}:`, ['production']), TemplateError)
  },
  async an_existing_template_exists() {
    const { name } = await build(Template().fromBaseImage())
    assert.equal(await Template.exists(name), true)
  },
  async an_unknown_template_does_not_exist() {
    assert.equal(await Template.exists(newName()), false)
  },
}

await main(CHECKS, 3)
