/** `Generation`: one answer that is being made, from the request to the end of its stream. */

import { ApiError, ask, events } from "./api.js";
import { parsed } from "./request.js";

/** @typedef {import("./records.js").Message} Message */

/** Milliseconds between two writes of an unfinished answer. */
const SAVE_MS = 2000;

/** Ids of the requests that this page has made. @type {Set<string>} */
export const made = new Set();

export class Generation extends EventTarget {
  /** Events: `begin` (the server has taken the request), `piece`, `end`.
   * @param {Message} message the answer, which is filled
   * @param {string} path @param {Record<string, any>} body
   * @param {(message: Message) => void} save */
  constructor(message, path, body, save) {
    super();
    this.message = message;
    this.path = path;
    this.body = body;
    this._save = save;
    this._abort = new AbortController();
    this.hasBegun = false;
    this.isStopped = false;
    /** The prompt's ids when going on from an answer's ids. @type {number} */
    this.numGiven = 0;
    this._savedAt = 0;
  }

  /** End the request: the server sees that the connection is closed, and frees its pages. */
  stop() {
    this.isStopped = true;
    this._abort.abort();
  }

  /** Make the answer. Throws `ApiError` where the server refuses before it begins. */
  async run() {
    const { message } = this;
    const started = performance.now();
    message.finish = "running";
    const figures = (message.figures = {
      requestId: "", model: String(this.body.model ?? ""), promptTokens: 0, cachedTokens: 0,
      completionTokens: 0, firstMs: /** @type {number | null} */ (null),
      totalMs: /** @type {number | null} */ (null), startedAt: Date.now(),
    });
    try {
      const response = await ask(this.path, { body: this.body, signal: this._abort.signal });
      this.hasBegun = true;
      this.dispatchEvent(new Event("begin"));
      if (this.body.stream) await this._stream(response, started);
      else this._whole(await response.json());
    } catch (error) {
      if (this.isStopped) message.finish = "stopped";
      else if (!this.hasBegun) throw error;
      else this._broken(error);
    } finally {
      figures.totalMs = performance.now() - started;
      if (message.finish === "running") message.finish = this.isStopped ? "stopped" : "lost";
      if (this.hasBegun) this._save(message);
      this.dispatchEvent(new Event("end"));
    }
  }

  /** @param {unknown} error */
  _broken(error) {
    const { message } = this;
    const known = error instanceof ApiError ? error : new ApiError("lost", String(error));
    message.finish = known.kind === "lost" ? "lost" : "error";
    message.problem = known.kind === "lost" ? "" : known.message;
  }

  /** @param {Response} response @param {number} started */
  async _stream(response, started) {
    const figures = /** @type {NonNullable<Message["figures"]>} */ (this.message.figures);
    for await (const { data } of events(response, this._abort.signal)) {
      if (data === "[DONE]") continue;
      const chunk = parsed(data);
      if (chunk === undefined) continue;
      if (chunk.error) {
        throw new ApiError("failed", String(chunk.error.message ?? ""), { code: chunk.error.code });
      }
      this._head(chunk);
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const ids = choice.token_ids ?? [];
      if (ids.length && figures.firstMs === null) figures.firstMs = performance.now() - started;
      figures.completionTokens += ids.length;
      this._add(choice.delta ?? { content: choice.text }, ids);
      if (choice.finish_reason) this.message.finish = choice.finish_reason;
      this.dispatchEvent(new Event("piece"));
      if (performance.now() - this._savedAt > SAVE_MS) {
        this._savedAt = performance.now();
        this._save(this.message);
      }
    }
  }

  /** @param {any} answer */
  _whole(answer) {
    this._head(answer);
    const choice = answer.choices[0];
    this._add(choice.message ?? { content: choice.text }, choice.token_ids ?? []);
    this.message.finish = choice.finish_reason;
  }

  /** @param {any} chunk */
  _head(chunk) {
    const { message } = this;
    const figures = /** @type {NonNullable<Message["figures"]>} */ (message.figures);
    figures.requestId ||= chunk.id ?? "";
    made.add(figures.requestId);
    const ids = chunk.prompt_token_ids ?? chunk.choices?.[0]?.prompt_token_ids;
    if (ids && !this.numGiven) message.promptIds = ids;
    if (chunk.usage) {
      figures.promptTokens = chunk.usage.prompt_tokens;
      figures.completionTokens = chunk.usage.completion_tokens;
      figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }

  /** @param {any} delta @param {number[]} ids */
  _add(delta, ids) {
    const { message } = this;
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
}
