// Drives pg-boss: `node with_pg_boss.mjs fill|work|produce SETTINGS`.
//
// Uses `insert`, `send` and `work`. Supervision, schedules and the checks of vacuum and indexes are off: in runs of
// seconds they would be start-up cost only. `settings.work` are the options of `work`, `settings.notify` turns
// LISTEN/NOTIFY on for the instance and the queue.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { makeTally, measure, ready, terminated } from "./tally.mjs";

const [role, text] = process.argv.slice(2);
const settings = JSON.parse(text);
const resolved = createRequire(settings.package_json).resolve("pg-boss");
const { PgBoss } = await import(pathToFileURL(resolved));

const CHUNK = 5000;
const boss = new PgBoss({
  connectionString: settings.url,
  supervise: false,
  schedule: false,
  useListenNotify: settings.notify && role === "work",
});
boss.on("error", (error) => console.error(String(error)));
await boss.start();

if (role === "fill") {
  await boss.createQueue("noop", { notify: settings.notify });
  for (let made = 0; made < settings.jobs; made += CHUNK) {
    const size = Math.min(CHUNK, settings.jobs - made);
    await boss.insert("noop", Array.from({ length: size }, (_, i) => ({ data: { n: made + i } })));
  }
} else if (role === "work") {
  const ran = makeTally(settings);
  await ready(settings);
  await boss.work("noop", settings.work, async (jobs) => {
    for (let i = 0; i < jobs.length; i += 1) ran();
  });
  await terminated();
} else {
  const latencies = await measure(() => boss.send("noop", { n: 1 }), settings);
  process.stdout.write(JSON.stringify(latencies) + "\n");
}
await boss.stop({ graceful: true, timeout: 5000 });
process.exit(0);
