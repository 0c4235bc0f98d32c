// Runs checks of a client, a few at a time, and prints one JSON line for each.

import assert from 'node:assert/strict'

export async function until(condition, seconds = 60) {
  const deadline = Date.now() + seconds * 1000
  for (;;) {
    const found = await condition()
    if (found) return found
    assert.ok(Date.now() < deadline, 'it did not become so')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

async function run(name, check) {
  const started = Date.now()
  let problem = null
  try {
    await check()
  } catch (error) {
    problem = error.stack ?? String(error)
  }
  console.log(JSON.stringify({ check: name, problem, seconds: (Date.now() - started) / 1000 }))
}

// Runs the check on the command line, or all.
export async function main(checks, concurrency) {
  const waiting = process.argv[2] ? [process.argv[2]] : Object.keys(checks)
  const work = async () => { for (let name; (name = waiting.shift());) await run(name, checks[name]) }
  await Promise.all(Array.from({ length: concurrency }, work))
  process.exit(0)
}
