// Drives graphile-worker: `node with_graphile_worker.mjs fill|work|produce SETTINGS`.
//
// Uses `run`, `makeWorkerUtils`, `addJob` and `addJobs` of its library. The logger is silenced, because it writes two
// lines a job otherwise. No cron: none is configured.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { makeTally, measure, ready, terminated } from "./tally.mjs";

const [role, text] = process.argv.slice(2);
const settings = JSON.parse(text);
// The package lies in the comparison's cache and not beside this file.
const resolved = createRequire(settings.package_json).resolve("graphile-worker");
const { Logger, makeWorkerUtils, run } = await import(pathToFileURL(resolved));

const CHUNK = 5000;
const logger = new Logger(() => () => {});
const connection = { connectionString: settings.url, logger };

if (role === "fill") {
  const utils = await makeWorkerUtils(connection);
  await utils.migrate();
  for (let made = 0; made < settings.jobs; made += CHUNK) {
    const size = Math.min(CHUNK, settings.jobs - made);
    await utils.addJobs(
      Array.from({ length: size }, (_, i) => ({ identifier: "noop", payload: { n: made + i } })),
    );
    // Planned on empty tables, filling takes time that grows with the square of the number.
    if (made === 0) await utils.withPgClient((client) => client.query("analyze"));
  }
  await utils.release();
} else if (role === "work") {
  const ran = makeTally(settings);
  await ready(settings);
  const runner = await run({
    preset: {
      worker: { ...connection, maxPoolSize: settings.concurrency + 1, concurrentJobs: settings.concurrency, ...settings.worker },
    },
    noHandleSignals: true,
    taskList: {
      noop: async () => {
        ran();
      },
    },
  });
  await terminated();
  await runner.stop();
  process.exit(0);
} else {
  const utils = await makeWorkerUtils(connection);
  const latencies = await measure(() => utils.addJob("noop", { n: 1 }), settings);
  process.stdout.write(JSON.stringify(latencies) + "\n");
  await utils.release();
}
