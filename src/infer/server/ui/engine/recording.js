/** Recordings of an engine's steps: keeping the last minutes, saving and opening files. */

import { History, KEPT_MS } from "./history.js";
import { columnsOf } from "./states.js";

export const FORMAT = "infer-recording";
/** The largest file that is opened, in bytes. */
const MAX_BYTES = 64 * 1024 * 1024;

/** @typedef {{format: string, hello: any, frames: any[], summary?: any}} Recording */

/** The frames of the last minutes, so that they can be saved. */
export class Keeper {
  /** @param {any} hello */
  constructor(hello) {
    this.hello = hello;
    /** @type {any[]} */
    this.frames = [];
    /** What was known before the first of `frames`. */
    this.before = new History(hello);
  }

  /** @param {any} frame */
  take(frame) {
    this.frames.push(frame);
    let count = 0;
    while (count < this.frames.length - 1 && this.frames[count].at < frame.at - KEPT_MS) count += 1;
    if (count > 512) for (const old of this.frames.splice(0, count)) this.before.take(old);
  }

  /** @returns {Recording} */
  recording() {
    const requests = columnsOf([...this.before.open.values()].map((bar) => ({
      request: bar.number, name: bar.name, choice: bar.choice, prompt_tokens: bar.prompt,
      max_tokens: bar.most, received: bar.since, ...bar.row(),
    })));
    const at = this.frames[0]?.at ?? 0;
    const first = { at, requests, gauges: this.before.gauges };
    return { format: FORMAT, hello: this.hello, frames: [first, ...this.frames] };
  }
}

/** @param {Recording} recording @param {string} name */
export function save(recording, name) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(recording)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** @param {unknown} value @returns {value is Recording} */
function isRecording(value) {
  const found = /** @type {any} */ (value);
  return found?.format === FORMAT && found.hello?.version === 2 && Array.isArray(found.hello.gap_bounds_ms)
    && Array.isArray(found.frames) && found.frames.every((/** @type {any} */ each) => typeof each?.at === "number");
}

/** The recordings of a file: one, or those of a comparison. Throws where it has none.
 * @param {File} file @returns {Promise<Recording[]>} */
export async function open(file) {
  if (file.size > MAX_BYTES) throw new Error("large");
  const value = JSON.parse(await file.text());
  const found = value?.object === "engine.comparison" ? value.recordings : [value];
  if (!Array.isArray(found) || !found.length || !found.every(isRecording)) throw new Error("format");
  found.forEach((each) => played(each)); // throws where a frame is damaged
  return found;
}

/** The history of a whole recording. @param {Recording} recording */
export function played(recording) {
  const history = new History(recording.hello);
  for (const frame of recording.frames) history.take(frame);
  return history;
}
