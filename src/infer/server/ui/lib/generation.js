/** `Generation`: answers that are being made by one request, from the request to the end of its stream. A connection that
 * is lost is taken up again where it ended: the server keeps the answer. */

import { ApiError, ask, events } from "./api.js";
import { parsed } from "./request.js";

/** @typedef {import("./records.js").Message} Message */
/** @typedef {{state: string, queued_behind: number, prompt_tokens_done: number, prompt_tokens: number}} Status
 * why a stream is silent: see docs/events.md; the state `lost` is ours */

/** Milliseconds between two writes of an unfinished answer. */
const SAVE_MS = 1000;
/** Milliseconds of silence after which the reason is shown. */
const SILENT_MS = 2000;
/** How long a lost connection is tried again, and the first and longest pause between two tries, in milliseconds. */
const [RESUME_MS, FIRST_PAUSE_MS, LAST_PAUSE_MS] = [120_000, 250, 4000];

/** Ids of the requests that this page has made. @type {Set<string>} */
export const made = new Set();

export class Generation extends EventTarget {
  /** Events: `begin` (the server has taken the request), `piece`, `end`.
   * @param {Message[]} messages the answers, which are filled: one for each choice
   * @param {string} path @param {Record<string, any>} body
   * @param {(messages: Message[]) => void} save */
  constructor(messages, path, body, save) {
    super();
    this.messages = messages;
    this.message = messages[0];
    this.path = path;
    this.body = body;
    this._save = save;
    this._abort = new AbortController();
    this.hasBegun = false;
    this.isStopped = false;
    /** The prompt's ids when going on from an answer's ids. @type {number} */
    this.numGiven = 0;
    /** Why nothing comes. @type {Status | null} */
    this.status = null;
    this._savedAt = 0;
    this._heardAt = 0;
    this._isDone = false;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._telling = undefined;
  }

  /** End the request: also one that goes on without a connection. */
  stop() {
    this.isStopped = true;
    this._abort.abort();
    const name = this.message.resume?.name;
    if (name) ask(`/v1/requests/${name}/cancel`, { method: "POST" }).catch(() => {});
  }

  /** Make the answers. Throws `ApiError` where the server refuses before it begins. */
  async run() {
    const started = performance.now();
    const resume = this.body.stream ? { name: `page-${this.message.id}`, at: 0, numGiven: this.numGiven } : undefined;
    for (const message of this.messages) {
      message.finish = "running";
      message.resume = resume;
      message.figures = {
        requestId: "", model: String(this.body.model ?? ""), promptTokens: 0, cachedTokens: 0,
        completionTokens: 0, firstMs: null, totalMs: null, startedAt: Date.now(),
      };
    }
    /** @type {Record<string, string>} */
    const headers = resume ? { "x-keep-answer": "true", "x-request-id": resume.name } : {};
    await this._make(started, async () => {
      const response = await ask(this.path, { body: this.body, signal: this._abort.signal, headers });
      this.hasBegun = true;
      this.dispatchEvent(new Event("begin"));
      if (this.body.stream) await this._follow(response, started);
      else this._whole(await response.json());
    });
  }

  /** Go on with answers that a page before this one has begun. */
  async resume() {
    this.hasBegun = true;
    this.numGiven = this.message.resume?.numGiven ?? 0;
    const started = performance.now() - (Date.now() - (this.message.figures?.startedAt ?? Date.now()));
    await this._make(started, () => this._follow(null, started));
  }

  /** @param {number} started @param {() => Promise<void>} work */
  async _make(started, work) {
    try {
      await work();
    } catch (error) {
      if (!this.isStopped && !this.hasBegun) throw error;
      for (const message of this.messages) {
        if (message.finish !== "running") continue;
        if (this.isStopped) message.finish = "stopped";
        else this._broken(message, error);
      }
    } finally {
      clearTimeout(this._telling);
      this.status = null;
      for (const message of this.messages) {
        if (message.figures) message.figures.totalMs = performance.now() - started;
        if (message.finish === "running") message.finish = this.isStopped ? "stopped" : "lost";
        delete message.resume;
      }
      if (this.hasBegun) this._save(this.messages);
      this.dispatchEvent(new Event("end"));
    }
  }

  /** @param {Message} message @param {unknown} error */
  _broken(message, error) {
    const known = error instanceof ApiError ? error : new ApiError("lost", String(error));
    const isLost = ["lost", "offline"].includes(known.kind) || [404, 410].includes(known.status);
    message.finish = isLost ? "lost" : "error";
    message.problem = isLost ? "" : known.message;
  }

  /** Read the stream to its end, over as many connections as that takes.
   * @param {Response | null} response @param {number} started */
  async _follow(response, started) {
    let [pause, lostAt] = [FIRST_PAUSE_MS, 0];
    const { signal } = this._abort;
    while (!this._isDone && !signal.aborted) {
      try {
        response ??= await this._again();
        for await (const event of events(response, signal)) {
          [pause, lostAt] = [FIRST_PAUSE_MS, 0];
          this._take(event, started);
        }
        response = null;
        if (!this._isDone && !signal.aborted) throw new ApiError("lost", "");
      } catch (error) {
        const isLost = error instanceof ApiError && ["lost", "offline", "busy"].includes(error.kind);
        lostAt ||= performance.now();
        if (signal.aborted || !isLost || performance.now() - lostAt > RESUME_MS) throw error;
        response = null;
        this._tell({ state: "lost", queued_behind: 0, prompt_tokens_done: 0, prompt_tokens: 0 });
        await new Promise((done) => setTimeout(done, pause));
        pause = Math.min(LAST_PAUSE_MS, 2 * pause);
      }
    }
  }

  /** What comes behind the last event that was read. */
  _again() {
    const { name, at } = /** @type {NonNullable<Message["resume"]>} */ (this.message.resume);
    return ask(`/v1/requests/${name}/events?after=${at}`, { signal: this._abort.signal });
  }

  /** @param {{data: string, id: number}} event @param {number} started */
  _take({ data, id }, started) {
    const { resume } = this.message;
    if (resume && id && id <= resume.at) return;
    if (data === "[DONE]") {
      this._isDone = true;
      return;
    }
    const chunk = parsed(data);
    if (chunk?.object === "infer.status") this._tell(chunk);
    else if (chunk?.error) throw new ApiError("failed", String(chunk.error.message ?? ""), { code: chunk.error.code });
    else if (chunk) this._piece(chunk, started);
    if (resume && id) resume.at = id;
    if (chunk?.object !== "infer.status" && performance.now() - this._savedAt > SAVE_MS) {
      this._savedAt = performance.now();
      this._save(this.messages);
    }
  }

  /** Show a status once nothing has come for a while. @param {Status} status */
  _tell(status) {
    clearTimeout(this._telling);
    const silent = performance.now() - this._heardAt;
    this._telling = setTimeout(() => {
      this.status = status;
      this.dispatchEvent(new Event("piece"));
    }, Math.max(0, this._heardAt ? SILENT_MS - silent : SILENT_MS / 2));
  }

  /** @param {any} chunk @param {number} started */
  _piece(chunk, started) {
    clearTimeout(this._telling);
    this.status = null;
    this._heardAt = performance.now();
    this._head(chunk);
    for (const choice of chunk.choices ?? []) {
      const message = this.messages[choice.index ?? 0];
      const figures = message?.figures;
      if (!message || !figures) continue;
      const ids = choice.token_ids ?? [];
      if (ids.length && figures.firstMs === null) figures.firstMs = performance.now() - started;
      figures.completionTokens += ids.length;
      add(message, choice.delta ?? { content: choice.text }, ids);
      if (choice.finish_reason) message.finish = choice.finish_reason;
    }
    this.dispatchEvent(new Event("piece"));
  }

  /** @param {any} answer */
  _whole(answer) {
    this._head(answer);
    for (const choice of answer.choices) {
      const message = this.messages[choice.index ?? 0];
      if (!message) continue;
      add(message, choice.message ?? { content: choice.text }, choice.token_ids ?? []);
      message.finish = choice.finish_reason;
    }
  }

  /** @param {any} chunk */
  _head(chunk) {
    const ids = chunk.prompt_token_ids ?? chunk.choices?.[0]?.prompt_token_ids;
    made.add(String(chunk.id ?? ""));
    for (const message of this.messages) {
      const figures = /** @type {NonNullable<Message["figures"]>} */ (message.figures);
      figures.requestId ||= String(chunk.id ?? "");
      if (ids && !this.numGiven) message.promptIds = ids;
      if (!chunk.usage) continue;
      figures.promptTokens = chunk.usage.prompt_tokens;
      if (this.messages.length === 1) figures.completionTokens = chunk.usage.completion_tokens;
      figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      if (chunk.usage.truncated_messages) figures.truncated = chunk.usage.truncated_messages;
    }
  }
}

/** @param {Message} message @param {any} delta @param {number[]} ids */
function add(message, delta, ids) {
  if (ids.length) (message.tokenIds ??= []).push(...ids);
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  if (delta.content) message.content += delta.content;
  for (const [i, call] of (delta.tool_calls ?? []).entries()) {
    const calls = (message.toolCalls ??= []);
    const known = calls[call.index ?? i];
    if (known) known.function.arguments += call.function?.arguments ?? "";
    else {
      calls.push({
        id: String(call.id), type: "function",
        function: { name: String(call.function.name), arguments: String(call.function.arguments ?? "") },
      });
    }
  }
}
