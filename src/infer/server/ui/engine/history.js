/** `History`: what an engine did in the last minutes, from the frames of its stream (docs/events.md).
 * Times are milliseconds since `hello.time`. Memory is bounded by `KEPT_MS`. Where several engines serve the model
 * (replicas), each has its own steps, seats and pages; one engine without a name is the replica "". */

import { RequestState, rowsOf } from "./states.js";

/** How long things are kept, in milliseconds. */
export const KEPT_MS = 600_000;
const MAX_STEPS = 400_000;

/** @typedef {"waiting" | "preempted" | "cached" | "chunk" | "decode" | "prompt"} Kind */
/** @typedef {{kind: Kind, from: number, to: number | null, lane: number, tokens: number, replica: string}} Span
 * a part of a request's bar; `lane` is a seat of the replica, or -1 - the place in the queue */

/** A request and its bar. */
export class Bar extends RequestState {
  /** @param {number} number @param {Record<string, any>} told */
  constructor(number, told) {
    super();
    this.number = number;
    /** @type {string | null} */
    this.name = told.name;
    /** @type {number} */
    this.choice = told.choice;
    /** @type {number} */
    this.prompt = told.prompt_tokens;
    /** @type {number} */
    this.most = told.max_tokens;
    /** @type {number} */
    this.since = told.received;
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
/** @typedef {{from: number, to: number | null}} Absence a time in which a replica was not ready; null: it is not over */

/** What is known of one engine. */
export class Replica {
  constructor() {
    /** @type {Series<Step>} */
    this.steps = new Series();
    /** @type {Absence[]} */
    this.absences = [];
    /** Null until they are known. @type {number | null} */
    this.restarts = null;
    /** Pages of its KV cache, also while there is no engine. */
    this.pages = 0;
    this.maxLane = 0;
  }
}

export class History {
  /** @param {any} hello */
  constructor(hello) {
    this.hello = hello;
    /** Unfinished requests by number. @type {Map<number, Bar>} */
    this.open = new Map();
    /** Requests that have ended, in the order of their ends. @type {Bar[]} */
    this.ended = [];
    /** By name. @type {Map<string, Replica>} */
    this.replicas = new Map([["", new Replica()]]);
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
    /** Times at which static batches began. @type {number[]} */
    this.batches = [];
    /** @type {Record<string, any>} */
    this.gauges = {};
    this.now = 0;
    this.start = Number.POSITIVE_INFINITY;
    this.number = 0;
    this.leftOut = 0;
    this.queueRows = 0;
  }

  /** @param {any} frame */
  take(frame) {
    this.now = Math.max(this.now, frame.at);
    this.start = Math.min(this.start, frame.at);
    if (frame.restarted) this._restart(frame.at);
    this._steps(frame);
    for (const event of frame.events ?? []) this._event(event, frame.at + event.after);
    for (const { event, after } of frame.batches ?? []) if (event === "formed") this.batches.push(frame.at + after);
    let total = 0;
    for (const [number, count] of Object.entries(frame.tokens ?? {})) {
      total += count;
      const bar = this.open.get(Number(number));
      if (bar) bar.output += count;
    }
    if (total) this.output.add(this.now, total);
    if (frame.gaps) this.gaps.add(this.now, frame.gaps);
    if (frame.gauges) this._gauges(frame.gauges);
    if (frame.left_out) this.leftOut += frame.left_out.steps + frame.left_out.events;
    if (frame.requests) this._replace(frame.requests);
    let running = 0;
    for (const bar of this.open.values()) running += bar.state === "running" ? 1 : 0;
    this.queue.add(this.now, { waiting: this.open.size - running, running });
    this._forget();
  }

  /** Whether several engines serve the model, or one that has a name. */
  get hasReplicas() {
    return !this.replicas.has("");
  }

  /** What is known of an engine; a new name begins a replica. @param {string} name @returns {Replica} */
  replica(name) {
    let found = this.replicas.get(name);
    if (!found) {
      found = new Replica();
      if (!name) return found; // the others have names
      this.replicas.delete("");
      this.replicas.set(name, found);
    }
    return found;
  }

  /** @param {Record<string, any>} gauges */
  _gauges(gauges) {
    this.gauges = gauges;
    const given = gauges.replicas ?? {};
    for (const name of Object.keys(given)) this.replica(name);
    for (const [name, replica] of this.replicas) {
      replica.pages = (name ? given[name]?.pages : gauges.pages) || replica.pages;
      if (!name) continue;
      const { ready = false, restarts = replica.restarts } = given[name] ?? {};
      const last = replica.absences[replica.absences.length - 1];
      const isAbsent = last && last.to === null;
      if (!ready && !isAbsent) replica.absences.push({ from: this.now, to: null });
      else if (ready && isAbsent) last.to = this.now;
      // It has died and come back between two frames.
      else if (ready && replica.restarts !== null && restarts > replica.restarts && last?.to !== this.now) replica.absences.push({ from: this.now, to: this.now });
      replica.restarts = restarts;
    }
  }

  /** @param {any} frame */
  _steps(frame) {
    let at = frame.at;
    if (frame.number !== undefined) this.number = frame.number;
    for (const row of rowsOf(frame.steps ?? {})) {
      const { count, duration: ms, sequences, prompt_tokens: prompt, free_pages: free, cached_pages: cached } = row;
      at += row.pause;
      this.number += count;
      this.replica(row.replica ?? "").steps.add(at, { number: row.number ?? this.number, count, ms, sequences, prompt, free, cached });
      at += ms;
      this.now = Math.max(this.now, at);
    }
  }

  /** @param {import("./states.js").FrameEvent} event @param {number} at */
  _event(event, at) {
    const known = this.open.get(event.request);
    if (!known && event.event !== "queued") return;
    const bar = known ?? new Bar(event.request, event);
    bar.apply(event);
    if (!known) {
      this.open.set(bar.number, bar);
      this._begin(bar, "waiting", Math.min(bar.since, at), this._queueRow());
      return;
    }
    switch (event.event) {
      case "admitted":
        this._begin(bar, "prompt", at, this._seat(bar.replica));
        if (bar.cached) bar.spans.push({ kind: "cached", from: at, to: at, lane: bar.last.lane, tokens: bar.cached, replica: bar.replica });
        break;
      case "chunk": {
        const to = at + event.duration;
        bar.spans.push({ kind: "chunk", from: at, to, lane: this._laneOf(bar), tokens: event.tokens, replica: bar.replica });
        if (bar.firstMs !== null) this._begin(bar, "decode", to, this._laneOf(bar));
        break;
      }
      case "first_token":
        bar.firstMs = event.since_received;
        this.first.add(at, event.since_received);
        this._begin(bar, "decode", at, this._laneOf(bar));
        break;
      case "preempted":
      case "resumed":
        this._begin(bar, event.event === "resumed" ? "waiting" : "preempted", at, this._queueRow());
        break;
      case "finished":
        this._end(bar, event.outcome, at);
        break;
      default:
    }
  }

  /** @param {Bar} bar @param {string} reason @param {number} at */
  _end(bar, reason, at) {
    bar.reason = reason;
    bar.end = at;
    this._close(bar, at);
    this.open.delete(bar.number);
    this.ended.splice(this._endedBefore(at), 0, bar);
  }

  /** Number of the bars that had ended before a time, which is late among them. @param {number} time */
  _endedBefore(time) {
    return this.ended.findLastIndex((bar) => (bar.end ?? 0) < time) + 1;
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
    bar.spans.push({ kind, from, to: null, lane, tokens: 0, replica: bar.replica });
    const replica = this.replica(bar.replica);
    if (lane >= 0) replica.maxLane = Math.max(replica.maxLane, lane);
    else this.queueRows = Math.max(this.queueRows, -lane);
  }

  /** @param {(span: Span) => boolean} fits */
  _taken(fits) {
    const taken = new Set();
    for (const bar of this.open.values()) if (bar.last && fits(bar.last)) taken.add(bar.last.lane);
    return taken;
  }

  /** The lowest free seat of a replica. @param {string} replica */
  _seat(replica) {
    const taken = this._taken((span) => span.lane >= 0 && span.replica === replica);
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
  }

  _queueRow() {
    const taken = this._taken((span) => span.lane < 0);
    let lane = -1;
    while (taken.has(lane)) lane -= 1;
    return lane;
  }

  /** @param {number} at */
  _restart(at) {
    this.restarts.push(at);
    for (const bar of this.open.values()) {
      const hadSeat = bar.state === "running";
      bar.restart();
      if (hadSeat) this._begin(bar, "waiting", at, this._queueRow());
    }
  }

  /** The state of all requests, after something was left out. @param {Record<string, any[]>} columns */
  _replace(columns) {
    const known = new Set(columns.request ?? []);
    for (const [number, bar] of this.open) {
      if (!known.has(number)) this._end(bar, "?", this.now);
    }
    for (const row of rowsOf(columns)) {
      const bar = this.open.get(row.request) ?? new Bar(row.request, row);
      this.open.set(bar.number, bar);
      const before = bar.state;
      bar.set(row);
      const { state } = row;
      const { output, replica, since } = bar;
      const kind = state === "running" ? (output ? "decode" : "prompt") : state;
      const isSeated = state === "running";
      const hasMoved = isSeated && bar.last?.replica !== replica;
      if (before !== state || !bar.last || bar.last.kind !== kind || hasMoved) {
        const isThere = bar.last && bar.last.lane >= 0 === isSeated && !hasMoved;
        const lane = isThere ? bar.last.lane : isSeated ? this._seat(replica) : this._queueRow();
        this._begin(bar, kind, bar.last || isSeated ? this.now : Math.min(since, this.now), lane);
      }
    }
  }

  _forget() {
    const since = this.now - KEPT_MS;
    for (const series of [this.output, this.first, this.gaps, this.queue]) series.forget(since);
    for (const [name, replica] of this.replicas) {
      replica.steps.forget(since);
      if (replica.absences.length > 256) replica.absences.splice(0, 128);
      // One that has left the fleet stays as long as its steps can be shown.
      const isShown = Object.hasOwn(this.gauges.replicas ?? {}, name) || (replica.steps.at[replica.steps.at.length - 1] ?? 0) >= since;
      if (name && !isShown && this.replicas.size > 1) this.replicas.delete(name);
    }
    if (this.batches.length > 4096) this.batches.splice(0, 2048);
    const count = this.ended.findIndex((bar) => (bar.end ?? 0) >= since);
    if (count > 256) this.ended.splice(0, count);
  }

  /** The bars of a time, the ended ones first. @param {number} from @param {number} to */
  *bars(from, to) {
    for (let i = this._endedBefore(from); i < this.ended.length; i++) if (this.ended[i].since <= to) yield this.ended[i];
    for (const bar of this.open.values()) if (bar.since <= to) yield bar;
  }

  /** The step of a replica at a time, or the last before it, with the time of its start.
   * @param {number} time @param {string} name */
  stepAt(time, name) {
    const { steps } = this.replica(name);
    const index = steps.from(time + 1e-6) - 1;
    return index < 0 ? null : { index, at: steps.at[index], step: steps.values[index] };
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
