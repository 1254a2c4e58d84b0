/** `RequestState`: the state of a request, as the events of frames tell it (docs/events.md). The twin of
 * `requests.state` of the server: tests/server/frames.json has what both must make of the same frames. */

/** @typedef {{event: string, request: number, after: number, [field: string]: any}} FrameEvent */

export class RequestState {
  constructor() {
    /** @type {"waiting" | "running" | "preempted" | "finished"} */
    this.state = "waiting";
    /** Tokens found in the prefix cache when it was admitted last. */
    this.cached = 0;
    /** Tokens computed or found since then, its further output apart. */
    this.computed = 0;
    this.output = 0;
    /** Name of the replica that has it, or had it last. */
    this.replica = "";
  }

  /** Follow an event of this request. @param {FrameEvent} event */
  apply(event) {
    this.replica = event.replica ?? this.replica;
    switch (event.event) {
      case "queued":
      case "resumed":
        this._wait("waiting");
        break;
      case "preempted":
        this._wait("preempted");
        break;
      case "admitted":
        this.state = "running";
        this.cached = this.computed = event.cached_tokens;
        break;
      case "chunk":
        this.computed = event.from_token + event.tokens;
        break;
      case "finished":
        this.state = "finished";
        this.output = event.output_tokens;
        break;
      default: // "first_token", "speculated", and what a newer server tells
    }
  }

  /** The engine has died; the next one begins with nothing. */
  restart() {
    this._wait("waiting");
  }

  /** @param {"waiting" | "preempted"} state */
  _wait(state) {
    this.state = state;
    this.cached = this.computed = 0;
  }

  /** Take the state that a frame says. @param {Record<string, any>} row */
  set(row) {
    this.state = row.state;
    this.cached = row.cached_tokens;
    this.computed = row.computed_tokens;
    this.output = row.output_tokens;
    this.replica = row.replica ?? "";
  }

  /** What `set` takes. @returns {Record<string, any>} */
  row() {
    const { state, cached, computed, output, replica } = this;
    return { state, cached_tokens: cached, computed_tokens: computed, output_tokens: output, replica };
  }
}

/** The rows of a table that a frame has as one list for each column.
 * @param {Record<string, any[]>} columns @returns {Generator<Record<string, any>>} */
export function* rowsOf(columns) {
  const names = Object.keys(columns);
  const count = names.length ? columns[names[0]].length : 0;
  for (let i = 0; i < count; i++) yield Object.fromEntries(names.map((name) => [name, columns[name][i]]));
}

/** The other way round. @param {Record<string, any>[]} rows @returns {Record<string, any[]>} */
export function columnsOf(rows) {
  return Object.fromEntries(Object.keys(rows[0] ?? {}).map((name) => [name, rows.map((row) => row[name])]));
}

/** A frame with other times and other numbers of requests, as if an earlier stream had gone on.
 * @param {any} frame @param {{ms: number, number: number}} by what is added */
export function moved(frame, by) {
  if (!by.ms && !by.number) return frame;
  const next = { ...frame, at: frame.at + by.ms };
  /** @param {Record<string, any>} event */
  const later = (event) => ("received" in event ? { received: event.received + by.ms } : {});
  if (frame.events) {
    next.events = frame.events.map((/** @type {FrameEvent} */ event) => ({ ...event, ...later(event), request: event.request + by.number }));
  }
  if (frame.tokens) {
    next.tokens = Object.fromEntries(Object.entries(frame.tokens).map(([number, count]) => [Number(number) + by.number, count]));
  }
  if (frame.requests?.request) {
    next.requests = {
      ...frame.requests, request: frame.requests.request.map((/** @type {number} */ each) => each + by.number),
      received: frame.requests.received.map((/** @type {number} */ each) => each + by.ms),
    };
  }
  return next;
}
