/** `load`: requests that fill the engine's batch, so that there is something to see. They have the lowest priority: all
 * that others send goes before them. */

import { ApiError, askJson } from "../lib/api.js";

export const NUM_REQUESTS = 20;
/** The value of `priority` that all others go before. */
const LOWEST = 1000;
/** Prompts of a request to the server: a browser has six connections to it. */
const OF_ONE = 5;
const WORDS = ["fox", "boat", "tree", "girl", "river", "bear", "kite", "king", "garden", "star"];

class Load extends EventTarget {
  constructor() {
    super();
    this.numOpen = 0;
    /** @type {ApiError | null} */
    this.error = null;
    this._stop = new AbortController();
  }

  stop() {
    this._stop.abort();
  }

  /** Send the requests, and wait until all are answered. @param {string} model */
  async run(model) {
    if (this.numOpen) return;
    this._stop = new AbortController();
    this.error = null;
    const asking = [];
    for (let first = 0; first < NUM_REQUESTS; first += OF_ONE) asking.push(this._ask(model, first));
    await Promise.all(asking);
  }

  /** @param {string} model @param {number} first */
  async _ask(model, first) {
    const prompt = Array.from({ length: OF_ONE }, (_, i) => promptOf(first + i));
    const body = { model, prompt, max_tokens: 40 + 8 * first, temperature: 0.8, ignore_eos: true, priority: LOWEST };
    this._count(OF_ONE);
    try {
      await askJson("/v1/completions", { body, signal: this._stop.signal });
    } catch (error) {
      if (!this._stop.signal.aborted) this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
    this._count(-OF_ONE);
  }

  /** @param {number} by */
  _count(by) {
    this.numOpen += by;
    this.dispatchEvent(new Event("change"));
  }
}

/** A prompt of its own length. @param {number} i */
function promptOf(i) {
  const words = Array.from({ length: 1 + ((7 * i) % 40) }, (_, k) => WORDS[(3 * i + k) % WORDS.length]);
  return `Once upon a time there was a ${words.join(" and a ")}`;
}

export const load = new Load();
