// kafkajs as a client of the tests. It reads partition 0 and prints lines of offset, timestamp, key, value, headers,
// with bytes in hex. It reads only in groups, so each call uses a new group. An offset out of range is exit code 3.
'use strict'

const { randomUUID } = require('node:crypto')
const { Kafka, logLevel } = require('kafkajs')

const TIMEOUT_MS = 240_000
const OUT_OF_RANGE = 3

async function main([command, bootstrap, topic, offset, limit, isolation, maxBytes]) {
  const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN, logCreator: () => log })
  const consumer = kafka.consumer({
    groupId: `kafkajs-${randomUUID()}`,
    readUncommitted: isolation === 'read_uncommitted',
    maxBytesPerPartition: Number(maxBytes),
    maxWaitTimeInMs: 500,
  })
  const lines = []
  const done = new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`${lines.length} records came`)), TIMEOUT_MS).unref()
    consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error))
    consumer.on(consumer.events.GROUP_JOIN, () => consumer.seek({ topic, partition: 0, offset }))
    const take = async ({ message }) => {
      lines.push(line(message))
      if (command === 'read' && lines.length === Number(limit)) resolve(lines.length)
    }
    if (command === 'read-to') {
      // The event tells the position, also for batches without visible messages.
      consumer.on(consumer.events.END_BATCH_PROCESS, ({ payload }) => {
        if (BigInt(payload.lastOffset) + 1n >= BigInt(limit)) resolve(lines.length)
      })
    }
    consumer
      .connect()
      .then(() => consumer.subscribe({ topic }))
      .then(() => consumer.run({ eachMessage: take }))
      .catch(reject)
  })
  const count = await done
  process.stdout.write(lines.slice(0, count).join(''))
  await consumer.disconnect()
}

function line({ offset, timestamp, key, value, headers }) {
  const pairs = Object.entries(headers).flatMap(([name, values]) => [values].flat().map(each => ` ${name}=${hex(each)}`))
  return `${offset} ${timestamp} ${hex(key)} ${hex(value)}${pairs.join('')}\n`
}

function hex(bytes) {
  return bytes === null ? 'null' : `x${Buffer.from(bytes).toString('hex')}`
}

// Ends the process at an offset out of range. By default the client resets to the earliest or latest offset.
function log({ log: entry }) {
  process.stderr.write(`${entry.message}\n`)
  if (entry.message.startsWith('Offset out of range')) process.exit(OUT_OF_RANGE)
}

main(process.argv.slice(2)).catch(error => {
  process.stderr.write(`${error.stack}\n`)
  process.exit(1)
})
