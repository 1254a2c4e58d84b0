/** `live`: the stream of the engine's steps, one for the whole page. It is open from the first answer on, so that the
 * engine view knows what has happened; while nobody sees the page, it closes. */

import { ApiError, apiKey, ask, events } from "../lib/api.js";
import { FETCH_MS } from "./frames.js";
import { History } from "./history.js";
import { Keeper } from "./recording.js";
import { moved, rowsOf } from "./states.js";

/** How long the stream stays open while the page is hidden, in milliseconds: a browser has six connections to a server. */
const HIDDEN_MS = 20_000;
const [FIRST_PAUSE_MS, LAST_PAUSE_MS] = [500, 10_000];

/** @typedef {import("./history.js").Bar} Bar */

class Live extends EventTarget {
  /** Event: `change`, when `history`, its replicas, `error` or `reason` are others. */
  constructor() {
    super();
    /** @type {History | null} */
    this.history = null;
    /** @type {Keeper | null} */
    this.keeper = null;
    /** @type {ApiError | null} */
    this.error = null;
    /** Why the server has ended the stream; "" while it goes on. */
    this.reason = "";
    this.model = "";
    /** What is to be added to the stream's own times, from which `performance.now()` is less. */
    this.shift = 0;
    this._isWanted = false;
    this._stop = new AbortController();
    /** Times and numbers of a further stream begin behind those of the one before. */
    this._offset = { ms: 0, number: 0 };
    this._last = 0;
    /** Names of the requests that were seen. @type {Set<string>} */
    this._seen = new Set();
    /** Bars that were made from traces, by the request's name. @type {Map<string, Bar>} */
    this._filled = new Map();
    /** Answers from before the stream. @type {Array<[any, number]>} */
    this._before = [];
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._hiding = undefined;
    apiKey.addEventListener("change", () => { if (this._isWanted) this._restart(); });
    document.addEventListener("visibilitychange", () => this._shown());
  }

  /** Follow the engine of a model from now on. @param {string} model */
  open(model) {
    if (this._isWanted && model === this.model && !this._stop.signal.aborted) return;
    if (model !== this.model) this.history = this.keeper = null;
    this.model = model;
    this._isWanted = true;
    this._restart();
  }

  _restart() {
    this._stop.abort();
    this._stop = new AbortController();
    void this._follow(this._stop.signal);
  }

  _shown() {
    clearTimeout(this._hiding);
    if (!document.hidden) {
      if (this._isWanted && this._stop.signal.aborted) this._restart();
    } else this._hiding = setTimeout(() => this._stop.abort(), HIDDEN_MS);
  }

  /** The time that is shown at the right end of a picture, in the stream's milliseconds. It moves on evenly between two
   * pieces of the stream, a little behind them. */
  get shown() {
    return this.history ? Math.min(this.history.now + 1000, performance.now() + this.shift - FETCH_MS - 10) : 0;
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  /** Follow the stream; after a lost connection again. @param {AbortSignal} signal */
  async _follow(signal) {
    let pause = FIRST_PAUSE_MS;
    while (!signal.aborted) {
      try {
        const model = this.model ? `&model=${encodeURIComponent(this.model)}` : "";
        const response = await ask(`/v1/engine/events?every_ms=${FETCH_MS}${model}`, { signal });
        for await (const event of events(response, signal)) {
          pause = FIRST_PAUSE_MS;
          this._take(event.name, JSON.parse(event.data));
        }
      } catch (error) {
        if (signal.aborted) return;
        this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
        this.changed();
        if (["key", "forbidden"].includes(this.error.kind)) return;
        if (this.error.retryAfter) pause = 1000 * this.error.retryAfter;
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(LAST_PAUSE_MS, pause * 2);
    }
  }

  /** @param {string} name @param {any} data */
  _take(name, data) {
    if (name === "hello") this._begin(data);
    else if (name === "frame" && this.history && this.keeper) {
      const { hasReplicas } = this.history;
      const frame = moved(data, this._offset);
      for (const event of frame.events ?? []) this._know(event.request, event.name);
      for (const { request, name } of rowsOf(frame.requests ?? {})) this._know(request, name);
      this.history.take(frame);
      this.keeper.take(frame);
      this.shift = this.history.now - performance.now();
      for (const [trace, startedAt] of this._before.splice(0)) this.fill(trace, startedAt);
      if (this.history.hasReplicas !== hasReplicas) this.changed();
    } else if (name === "end") {
      this.reason = String(data.reason);
      this.changed();
    }
  }

  /** @param {number} number @param {string | null | undefined} name */
  _know(number, name) {
    this._last = Math.max(this._last, number);
    if (!name) return;
    this._seen.add(name);
    const filled = this._filled.get(name);
    if (!filled || !this.history) return;
    this.history.ended = this.history.ended.filter((bar) => bar !== filled);
    this._filled.delete(name);
  }

  /** Take an answer of this page, which may have ended before the stream began, from its trace.
   * @param {any} trace @param {number} startedAt by the browser's clock */
  fill(trace, startedAt) {
    const { history } = this;
    if (!history || !Number.isFinite(history.start)) {
      if (!this._before.some(([each]) => each.id === trace.id)) this._before.push([trace, startedAt]);
      return;
    }
    if (this._seen.has(trace.id) || trace.total_ms === null) return;
    this._seen.add(trace.id);
    const received = performance.now() + this.shift - (Date.now() - startedAt);
    const told = { request: -this._seen.size, name: trace.id, choice: 0, prompt_tokens: trace.prompt_tokens, max_tokens: trace.max_tokens, received };
    const defaults = { duration: 0, output_tokens: trace.completion_tokens };
    history.start = Math.min(history.start, received);
    history.number = Math.max(history.number, ...trace.events.map((/** @type {any} */ event) => event.step ?? 0));
    for (const event of trace.events) {
      if (!event.choice) history._event({ ...defaults, since_received: event.at_ms, ...event, ...told, after: 0 }, received + event.at_ms);
    }
    const bar = history.ended.find((each) => each.number === told.request);
    if (bar) this._filled.set(trace.id, bar);
  }

  /** A further stream of the same engine goes on where the one before ended. @param {any} hello */
  _begin(hello) {
    const before = this.history?.hello;
    const isSame = before && before.model === hello.model && before.seats === hello.seats && before.mode === hello.mode;
    if (isSame) this._offset = { ms: hello.time - before.time, number: this._last + 1 };
    else {
      this.history = new History(hello);
      this.keeper = new Keeper(hello);
      this._offset = { ms: 0, number: 0 };
      this._last = 0;
      this._seen.clear();
      this._filled.clear();
    }
    this.error = null;
    this.reason = "";
    this.changed();
  }
}

export const live = new Live();
