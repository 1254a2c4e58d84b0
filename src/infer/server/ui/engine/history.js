/** `History`: what an engine did in the last minutes, from the frames of its stream (docs/events.md).
 * Times are milliseconds since `hello.time`. Memory is bounded by `KEPT_MS`. */

/** How long things are kept, in milliseconds. */
export const KEPT_MS = 600_000;
const MAX_STEPS = 400_000;

/** @typedef {"waiting" | "preempted" | "cached" | "chunk" | "decode" | "prompt"} Kind */
/** @typedef {{kind: Kind, from: number, to: number | null, lane: number, tokens: number}} Span
 * a part of a request's bar; `lane` is a seat, or -1 - the place in the queue */

/** A request's bar. */
export class Bar {
  /** @param {number} number @param {string | null} name @param {number} choice @param {number} prompt
   * @param {number} most @param {number} since */
  constructor(number, name, choice, prompt, most, since) {
    this.number = number;
    this.name = name;
    this.choice = choice;
    this.prompt = prompt;
    this.most = most;
    this.since = since;
    this.state = "waiting";
    this.cached = 0;
    this.computed = 0;
    this.output = 0;
    /** @type {number | null} */
    this.firstMs = null;
    /** @type {number | null} */
    this.end = null;
    this.reason = "";
    /** @type {Span[]} */
    this.spans = [];
  }

  get last() {
    return this.spans[this.spans.length - 1];
  }
}

/** A list of numbers that come with a time, the oldest first. @template T */
class Series {
  constructor() {
    /** @type {number[]} */
    this.at = [];
    /** @type {T[]} */
    this.values = [];
  }

  /** @param {number} at @param {T} value */
  add(at, value) {
    this.at.push(at);
    this.values.push(value);
  }

  /** Index of the first entry at or after a time. @param {number} time */
  from(time) {
    let low = 0;
    let high = this.at.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.at[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** @param {number} time */
  forget(time) {
    const index = Math.max(this.from(time), this.at.length - MAX_STEPS);
    // Cutting for every frame would move everything every time.
    if (index > 1024 && index * 4 > this.at.length) {
      this.at = this.at.slice(index);
      this.values = this.values.slice(index);
    }
  }
}

/** @typedef {{number: number, count: number, ms: number, sequences: number, prompt: number, free: number, cached: number}} Step */

export class History {
  /** @param {any} hello */
  constructor(hello) {
    this.hello = hello;
    /** Unfinished requests by number. @type {Map<number, Bar>} */
    this.open = new Map();
    /** Requests that have ended, the oldest first. @type {Bar[]} */
    this.ended = [];
    /** @type {Series<Step>} */
    this.steps = new Series();
    /** @type {Series<number>} */
    this.output = new Series();
    /** @type {Series<number>} */
    this.first = new Series();
    /** @type {Series<number[]>} */
    this.gaps = new Series();
    /** @type {Series<{waiting: number, running: number}>} */
    this.queue = new Series();
    /** @type {number[]} */
    this.restarts = [];
    /** @type {Record<string, any>} */
    this.gauges = {};
    this.now = 0;
    this.start = Number.POSITIVE_INFINITY;
    this.number = 0;
    this.leftOut = 0;
    this.maxLane = 0;
    this.queueRows = 0;
  }

  /** @param {any} frame */
  take(frame) {
    this.now = Math.max(this.now, frame.at);
    this.start = Math.min(this.start, frame.at);
    if (frame.restarted) this._restart(frame.at);
    this._steps(frame);
    for (const [kind, number, after, ...values] of frame.events ?? []) {
      this._event(kind, number, frame.at + after, values);
    }
    let total = 0;
    for (const [number, count] of frame.tokens ?? []) {
      total += count;
      const bar = this.open.get(number);
      if (bar) bar.output += count;
    }
    if (total) this.output.add(this.now, total);
    if (frame.gaps) this.gaps.add(this.now, frame.gaps);
    if (frame.gauges) this.gauges = frame.gauges;
    if (frame.left_out) this.leftOut += frame.left_out.steps + frame.left_out.events;
    if (frame.requests) this._replace(frame.requests);
    let running = 0;
    for (const bar of this.open.values()) running += bar.state === "running" ? 1 : 0;
    this.queue.add(this.now, { waiting: this.open.size - running, running });
    this._forget();
  }

  /** @param {any} frame */
  _steps(frame) {
    let at = frame.at;
    if (frame.number !== undefined) this.number = frame.number;
    for (const [count, pause, ms, sequences, prompt, free, cached] of frame.steps ?? []) {
      at += pause;
      this.number += count;
      this.steps.add(at, { number: this.number, count, ms, sequences, prompt, free, cached });
      at += ms;
    }
    this.now = Math.max(this.now, at);
  }

  /** @param {string} kind @param {number} number @param {number} at @param {any[]} values */
  _event(kind, number, at, values) {
    if (kind === "queued" && !this.open.has(number)) {
      const [, name, choice, prompt, most, since] = values;
      const bar = new Bar(number, name, choice, prompt, most, since);
      this.open.set(number, bar);
      this._begin(bar, "waiting", Math.min(since, at), this._queueRow());
      return;
    }
    const bar = this.open.get(number);
    if (!bar) return;
    switch (kind) {
      case "admitted":
        bar.state = "running";
        bar.cached = bar.computed = values[0];
        this._begin(bar, "prompt", at, this._seat());
        if (values[0]) bar.spans.push({ kind: "cached", from: at, to: at, lane: bar.last.lane, tokens: values[0] });
        break;
      case "chunk":
        bar.computed = values[0] + values[1];
        bar.spans.push({ kind: "chunk", from: at, to: at + values[2], lane: this._laneOf(bar), tokens: values[1] });
        if (bar.firstMs !== null) this._begin(bar, "decode", at + values[2], this._laneOf(bar));
        break;
      case "first_token":
        bar.firstMs = values[0];
        this.first.add(at, values[0]);
        this._begin(bar, "decode", at, this._laneOf(bar));
        break;
      case "preempted":
      case "resumed":
        bar.state = kind === "resumed" ? "waiting" : "preempted";
        bar.computed = 0;
        this._begin(bar, kind === "resumed" ? "waiting" : "preempted", at, this._queueRow());
        break;
      case "finished":
        bar.state = "finished";
        [bar.reason] = values;
        bar.end = at;
        this._close(bar, at);
        this.open.delete(number);
        this.ended.push(bar);
        break;
      default:
    }
  }

  /** @param {Bar} bar */
  _laneOf(bar) {
    return bar.last?.lane ?? 0;
  }

  /** End the part of a bar that has no end. @param {Bar} bar @param {number} at */
  _close(bar, at) {
    for (let i = bar.spans.length - 1; i >= 0; i--) {
      if (bar.spans[i].to === null) {
        bar.spans[i].to = Math.max(bar.spans[i].from, at);
        return;
      }
    }
  }

  /** @param {Bar} bar @param {Kind} kind @param {number} from @param {number} lane */
  _begin(bar, kind, from, lane) {
    this._close(bar, from);
    bar.spans.push({ kind, from, to: null, lane, tokens: 0 });
    if (lane >= 0) this.maxLane = Math.max(this.maxLane, lane);
    else this.queueRows = Math.max(this.queueRows, -lane);
  }

  /** @param {(lane: number) => boolean} fits */
  _taken(fits) {
    const taken = new Set();
    for (const bar of this.open.values()) if (bar.last && fits(bar.last.lane)) taken.add(bar.last.lane);
    return taken;
  }

  _seat() {
    const taken = this._taken((lane) => lane >= 0);
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
  }

  _queueRow() {
    const taken = this._taken((lane) => lane < 0);
    let lane = -1;
    while (taken.has(lane)) lane -= 1;
    return lane;
  }

  /** @param {number} at */
  _restart(at) {
    this.restarts.push(at);
    for (const bar of this.open.values()) {
      if (bar.state !== "running") continue;
      bar.state = "waiting";
      bar.computed = 0;
      this._begin(bar, "waiting", at, this._queueRow());
    }
  }

  /** The state of all requests, after something was left out. @param {any[][]} rows */
  _replace(rows) {
    const known = new Set(rows.map((row) => row[0]));
    for (const [number, bar] of this.open) {
      if (known.has(number)) continue;
      this._event("finished", number, this.now, [""]);
      bar.reason = "?";
    }
    for (const [number, state, name, choice, prompt, most, since, cached, computed, output] of rows) {
      let bar = this.open.get(number);
      if (!bar) {
        bar = new Bar(number, name, choice, prompt, most, since);
        this.open.set(number, bar);
      }
      Object.assign(bar, { cached, computed, output });
      const kind = state === "running" ? (output ? "decode" : "prompt") : state;
      if (bar.state !== state || !bar.last || bar.last.kind !== kind) {
        const isSeated = state === "running";
        const lane = bar.last && bar.last.lane >= 0 === isSeated ? bar.last.lane : isSeated ? this._seat() : this._queueRow();
        this._begin(bar, kind, bar.last || isSeated ? this.now : Math.min(since, this.now), lane);
      }
      bar.state = state;
    }
  }

  _forget() {
    const since = this.now - KEPT_MS;
    for (const series of [this.steps, this.output, this.first, this.gaps, this.queue]) series.forget(since);
    let count = 0;
    while (count < this.ended.length && (this.ended[count].end ?? 0) < since) count += 1;
    if (count > 256) this.ended.splice(0, count);
  }

  /** The bars of a time, the ended ones first. @param {number} from @param {number} to */
  *bars(from, to) {
    for (const bar of this.ended) if ((bar.end ?? 0) >= from && bar.since <= to) yield bar;
    for (const bar of this.open.values()) if (bar.since <= to) yield bar;
  }

  /** The step at a time, or the last before it, with the time of its start. @param {number} time */
  stepAt(time) {
    const index = this.steps.from(time + 1e-6) - 1;
    return index < 0 ? null : { index, at: this.steps.at[index], step: this.steps.values[index] };
  }

  /** Output tokens a second. @param {number} from @param {number} to */
  rate(from, to) {
    let total = 0;
    for (let i = this.output.from(from); i < this.output.at.length && this.output.at[i] <= to; i++) total += this.output.values[i];
    return to > from ? (1000 * total) / (to - from) : 0;
  }

  /** A percentile of first-token times, in milliseconds. @param {number} share @param {number} from @param {number} to */
  firstPercentile(share, from, to) {
    const { at, values } = this.first;
    const found = values.slice(this.first.from(from), this.first.from(to)).sort((a, b) => a - b);
    return at.length && found.length ? found[Math.min(found.length - 1, Math.floor(share * found.length))] : null;
  }

  /** Upper bound of the class in which a share of the gaps between tokens ends, in milliseconds.
   * @param {number} share @param {number} from @param {number} to */
  gapPercentile(share, from, to) {
    const bounds = [...this.hello.gap_bounds_ms, Number.POSITIVE_INFINITY];
    const counts = bounds.map(() => 0);
    const last = this.gaps.from(to);
    for (let i = this.gaps.from(from); i < last; i++) this.gaps.values[i].forEach((count, k) => { counts[k] += count; });
    const wanted = share * counts.reduce((sum, count) => sum + count, 0);
    let sum = 0;
    for (let k = 0; k < counts.length; k++) {
      sum += counts[k];
      if (counts[k] && sum >= wanted) return bounds[k];
    }
    return null;
  }
}
