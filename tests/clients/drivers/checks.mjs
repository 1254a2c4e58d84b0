// What the Node drivers share; the same as checks.py: named checks, and one JSON document.
// A driver is called `node DRIVER.mjs BASE_URL API_KEY MODEL TOOL_MODEL FOLDER LOOPS`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

export const [URL_, KEY, MODEL, TOOL_MODEL, , LOOPS] = process.argv.slice(2);
export const CITIES = ["Ulm", "Bonn", "Jena"];
export const LOOP_ANSWER = "All three are sunny.";
export const STORY = "Once upon a time";
export const QUESTION = [{ role: "user", content: "Tell me a story about a fox." }];
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Berlin", "Paris", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 7 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};

const checks = [];

export async function check(name, body) {
  try {
    await body();
    checks.push({ name, ok: true, what: "" });
  } catch (error) {
    checks.push({ name, ok: false, what: String(error?.stack ?? error).slice(0, 2000) });
  }
}

// Their names: one for each published chat template.
export async function loopModels() {
  const answer = await fetch(`${LOOPS}/models`);
  return (await answer.json()).data.map((model) => model.id);
}

export function weatherIsValid({ city, days }) {
  return ["Berlin", "Paris", "Rome"].includes(city) && days >= 1 && days <= 7;
}

// Whoever closes a stream has ended its request: the server's newest story must say so.
export async function untilCancelled() {
  const headers = { authorization: `Bearer ${KEY}` };
  for (let i = 0; i < 500; i++) {
    const answer = await fetch(`${URL_}/requests?model=${MODEL}`, { headers });
    if ((await answer.json()).data[0].outcome === "disconnected") return;
    await new Promise((done) => setTimeout(done, 20));
  }
  assert.fail("it runs on");
}

export function report(name) {
  const entry = createRequire(import.meta.url).resolve(name);
  const folder = entry.slice(0, entry.lastIndexOf(path.join("node_modules", name)));
  const file = path.join(folder, "node_modules", name, "package.json");
  const { version } = JSON.parse(readFileSync(file, "utf8"));
  console.log("\n" + JSON.stringify({ version, checks }));
}
