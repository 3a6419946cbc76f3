// What a handler of the comparison does in place of work, for Node: see tally.py, whose twin this is.
//
// Node has no shared memory that another program could read, so the count is a variable and a timer writes it down
// every few milliseconds: one write of 16 bytes, whatever the rate.

import { constants, existsSync, openSync, read, renameSync, writeSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { promisify } from "node:util";

const WRITE_MS = 5;
const LOOK_MS = 2;
const readAsync = promisify(read);

// The body of a handler: `settings` has `directory`, and `fifo` where the latency is measured.
export function makeTally({ directory, fifo }) {
  if (fifo) {
    const moment = Buffer.alloc(8);
    const pipe = openSync(fifo, constants.O_RDWR);
    return () => {
      moment.writeBigUInt64LE(process.hrtime.bigint());
      writeSync(pipe, moment);
    };
  }
  let count = 0;
  let written = 0;
  let file = null;
  const record = Buffer.alloc(16);
  const write = () => {
    if (count === written) return;
    record.writeBigUInt64LE(BigInt(count), 0);
    writeSync(file, record, 0, 16, 0);
    written = count;
  };
  setInterval(write, WRITE_MS).unref();
  process.on("exit", write);
  return () => {
    if (count === 0) {
      record.writeBigUInt64LE(process.hrtime.bigint(), 8);
      const path = join(directory, String(process.pid));
      file = openSync(path + ".new", "w");
      writeSync(file, record, 0, 16, 0);
      renameSync(path + ".new", path);
    }
    count += 1;
  };
}

// Enqueues one job at a time; the latencies in nanoseconds, as numbers.
export async function measure(enqueue, { fifo, jobs, warm_up, limit_s, pause_s }) {
  const found = [];
  const end = performance.now() + limit_s * 1000;
  const pipe = openSync(fifo, constants.O_RDWR);
  const answer = Buffer.alloc(8);
  while (found.length < jobs + warm_up && performance.now() < end) {
    await sleep(1000 * (pause_s[0] + Math.random() * (pause_s[1] - pause_s[0])));
    const began = process.hrtime.bigint();
    await enqueue();
    // In a thread of Node's, so that the event loop goes on. When it is read does not matter: the handler says when.
    await readAsync(pipe, answer, 0, 8, null);
    found.push(Number(answer.readBigUInt64LE() - began));
  }
  return found.slice(warm_up);
}

// Everything is loaded: says so, and waits for the file `go`, which appears when all processes are so far.
export async function ready({ go }) {
  process.stdout.write("ready\n");
  while (!existsSync(go)) await sleep(LOOK_MS);
}

// SIGTERM, as a promise.
export function terminated() {
  return new Promise((resolve) => process.once("SIGTERM", resolve));
}
