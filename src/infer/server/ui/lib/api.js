/** The server's public API: one request, its errors, and server-sent events. */

import { recall, keep } from "./local.js";

/** @typedef {"offline" | "key" | "forbidden" | "limit" | "busy" | "model" | "large" | "refused" | "failed" | "lost"} ErrorKind */

export class ApiError extends Error {
  /** @param {ErrorKind} kind @param {string} message what the server said
   * @param {{status?: number, code?: string | null, param?: string | null, retryAfter?: number | null}} [more] */
  constructor(kind, message, more = {}) {
    super(message);
    this.kind = kind;
    this.status = more.status ?? 0;
    this.code = more.code ?? null;
    this.param = more.param ?? null;
    /** Seconds after which another try may succeed. */
    this.retryAfter = more.retryAfter ?? null;
  }
}

/** The API key: in memory, and in `sessionStorage` if the reader says so. */
class Key extends EventTarget {
  constructor() {
    super();
    this.value = "";
    try {
      this.value = sessionStorage.getItem("infer.key") ?? "";
    } catch {
      // No storage: the key is asked for again after a reload.
    }
  }

  /** @param {string} value @param {boolean} remember */
  set(value, remember) {
    this.value = value.trim();
    try {
      if (remember && this.value) sessionStorage.setItem("infer.key", this.value);
      else sessionStorage.removeItem("infer.key");
    } catch {
      // See above.
    }
    this.dispatchEvent(new Event("change"));
  }
}

export const apiKey = new Key();

/** @param {Response} response @returns {Promise<ApiError>} */
async function errorOf(response) {
  let error = { message: "", code: null, param: null };
  try {
    error = { ...error, ...(await response.json()).error };
  } catch {
    // Not one of our server's errors: a proxy's, perhaps.
  }
  const { status } = response;
  const retry = Number.parseFloat(response.headers.get("retry-after") ?? "");
  /** @type {Record<number, ErrorKind>} */
  const kinds = { 401: "key", 403: "forbidden", 413: "large", 429: "limit", 502: "busy", 503: "busy", 504: "busy" };
  let kind = kinds[status] ?? (status >= 500 ? "failed" : "refused");
  if (status === 404 && error.code === "model_not_found") kind = "model";
  return new ApiError(kind, String(error.message || response.statusText), {
    status,
    code: error.code,
    param: error.param,
    retryAfter: Number.isFinite(retry) ? retry : null,
  });
}

/** Ask the server; throws `ApiError` for every answer but 2xx, and where there is none.
 * @param {string} path
 * @param {{method?: string, body?: unknown, signal?: AbortSignal, headers?: Record<string, string>}} [how] */
export async function ask(path, { method, body, signal, headers: more = {} } = {}) {
  /** @type {Record<string, string>} */
  const headers = { ...more };
  if (apiKey.value) headers.authorization = `Bearer ${apiKey.value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("offline", String(error));
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** @param {string} path @param {{method?: string, body?: unknown, signal?: AbortSignal}} [how]
 * @returns {Promise<any>} */
export async function askJson(path, how) {
  const response = await ask(path, how);
  try {
    return await response.json();
  } catch (error) {
    if (how?.signal?.aborted) throw error;
    throw new ApiError("lost", String(error));
  }
}

/** The events of a stream: name, data and number of each; 0 where it has none. Ends when the stream ends; throws `ApiError` of
 * the kind `lost` where the connection breaks.
 * @param {Response} response @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<{name: string, data: string, id: number}>} */
export async function* events(response, signal) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) return;
        throw new ApiError("lost", String(error));
      }
      if (part.done) return;
      rest += decoder.decode(part.value, { stream: true });
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = { name: "message", data: "", id: 0 };
        for (const line of rest.slice(0, end).split("\n")) {
          if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
          else if (line.startsWith("event:")) event.name = line.slice(6).trim();
          else if (line.startsWith("id:")) event.id = Number(line.slice(3)) || 0;
        }
        rest = rest.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What the page knows of the server: its models and the limits of its fields. */
class Server extends EventTarget {
  constructor() {
    super();
    /** @type {Array<{id: string, max_model_len: number | null, status?: string, reason?: string | null,
     *   sampling_defaults?: Record<string, any> | null}>} */
    this.models = [];
    /** @type {ApiError | null} */
    this.error = null;
    /** @type {Map<string, Record<string, any>>} */
    this._fields = new Map();
    this.model = recall("model", "");
    this.isKnown = false;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._again = undefined;
    apiKey.addEventListener("change", () => void this.refresh());
    addEventListener("online", () => void this.refresh());
  }

  get current() {
    return this.models.find((each) => each.id === this.model) ?? this.models[0];
  }

  /** @param {string} model */
  choose(model) {
    this.model = model;
    keep("model", model);
    this.dispatchEvent(new Event("change"));
  }

  /** Ask for the models; while that fails, or one of them is loading, ask again. */
  async refresh() {
    clearTimeout(this._again);
    try {
      this.models = (await askJson("/v1/models")).data;
      this.error = null;
      for (const [model, fields] of this._fields) if (!Object.keys(fields).length) this._fields.delete(model);
      if (this.current) this.fieldsOf(this.current.id);
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
    this.isKnown = true;
    const waits = this.error && this.error.kind !== "key";
    if (waits || this.models.some((each) => each.status === "loading" || each.status === "restarting")) {
      this._again = setTimeout(() => void this.refresh(), 2000);
    }
    this.dispatchEvent(new Event("change"));
  }

  /** The fields of a chat's body, as the OpenAPI document of a model has them; another model's, with the
   * same limits, until they are known. The document is long, so nothing waits for it: only the
   * settings show it. @param {string} id @returns {Record<string, any>} */
  fieldsOf(id) {
    const model = this.models.find((each) => each.id === id);
    if (model && (model.status ?? "loaded") === "loaded" && !this._fields.has(id)) void this._readFields(id);
    const known = [this._fields.get(id) ?? {}, ...this._fields.values()];
    return known.find((fields) => Object.keys(fields).length) ?? {};
  }

  /** @param {string} id */
  async _readFields(id) {
    this._fields.set(id, {});
    try {
      const found = await askJson(`/openapi.json?model=${encodeURIComponent(id)}`);
      this._fields.set(id, found.components.schemas.ChatBody.properties);
      this.dispatchEvent(new Event("change"));
    } catch {
      // The next refresh tries again; until then the server alone checks the settings.
    }
  }
}

export const server = new Server();
