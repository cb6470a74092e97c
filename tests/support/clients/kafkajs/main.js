// kafkajs as a client of the tests. It reads and writes partition 0 and prints lines of offset, timestamp, key, value, headers,
// with bytes in hex. It reads only in groups, so each call uses a new group. An offset out of range is exit code 3.
'use strict'

const { randomUUID } = require('node:crypto')
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require('kafkajs')
const lz4 = require('lz4js')
const zstd = require('fzstd')

const TIMEOUT_MS = 240_000
const OUT_OF_RANGE = 3

CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')
// These two only decompress. The encoder of lz4js links its blocks, which brokers refuse. fzstd has no encoder.
CompressionCodecs[CompressionTypes.LZ4] = () => ({ decompress: async buffer => Buffer.from(lz4.decompress(buffer)) })
CompressionCodecs[CompressionTypes.ZSTD] = () => ({ decompress: async buffer => Buffer.from(zstd.decompress(buffer)) })

async function main([command, bootstrap, topic, ...rest]) {
  const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN, logCreator: () => log })
  if (command === 'produce') await produce(kafka, topic, ...rest)
  else if (command === 'member') await member(kafka, topic, ...rest)
  else await read(kafka, command, topic, ...rest)
}

// Writes the lines of the standard input, each as one record, with acks=all, in batches of 20.
async function produce(kafka, topic, codec) {
  const values = require('node:fs').readFileSync(0, 'utf8').split('\n')
  const compression = { none: 0, gzip: 1, snappy: 2 }[codec]
  const producer = kafka.producer({ allowAutoTopicCreation: false, createPartitioner: () => () => 0 })
  await producer.connect()
  for (let at = 0; at < values.length; at += 20) {
    const messages = values.slice(at, at + 20).map(value => ({ value }))
    await producer.send({ topic, acks: -1, compression, messages })
  }
  await producer.disconnect()
}

// Reads in a group up to the offset before `end`. It prints "joined N" for the Nth generation that it joins, and
// "record OFFSET" for each record, at once.
async function member(kafka, topic, groupId, end) {
  const consumer = kafka.consumer({ groupId, sessionTimeout: 10_000, heartbeatInterval: 1_000, maxWaitTimeInMs: 500 })
  let joined = 0
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error))
    consumer.on(consumer.events.GROUP_JOIN, () => process.stdout.write(`joined ${++joined}\n`))
    const take = async ({ message }) => {
      process.stdout.write(`record ${message.offset}\n`)
      if (BigInt(message.offset) + 1n >= BigInt(end)) resolve()
    }
    consumer
      .connect()
      .then(() => consumer.subscribe({ topic, fromBeginning: true }))
      .then(() => consumer.run({ eachMessage: take }))
      .catch(reject)
  })
  await consumer.disconnect()
}

async function read(kafka, command, topic, offset, limit, isolation, maxBytes) {
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
