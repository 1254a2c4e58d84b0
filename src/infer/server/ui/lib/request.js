/** Bodies of requests, from a conversation and its settings. */

import { contentOf } from "./records.js";
import { server } from "./api.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */
/** @typedef {{kind: "number" | "integer" | "boolean" | "choice" | "lines", default: any,
 *   source?: string, min?: number, max?: number, isAbove?: boolean, zero?: boolean, values?: string[]}} Field */

/** Sampling settings, in the order in which they are shown. Their limits are the server's. */
export const SAMPLING = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "min_tokens", "stop", "reasoning_effort", "ignore_eos",
];

/** The most stop strings of a request. */
const MAX_STOPS = 16;

/** Sampling settings by name, for readers who do not want to choose numbers. */
export const PRESETS = {
  server: {},
  exact: { temperature: 0 },
  steady: { temperature: 0.4, top_p: 0.9 },
  free: { temperature: 1.1, top_p: 0.98, min_p: 0.05 },
};

/** What the server's OpenAPI document says of a field; null where it has none. `source`: what names
 * the default, if the model has one of its own.
 * @param {string} name @param {string} model @returns {Field | null} */
export function fieldOf(name, model) {
  const schema = server.fieldsOf(model)[name];
  if (!schema) return null;
  const own = server.models.find((each) => each.id === model)?.sampling_defaults;
  /** @type {Record<string, any>} */
  const found = {};
  /** @param {any} part */
  const walk = (part) => {
    for (const [key, value] of Object.entries(part)) {
      if (key === "anyOf") value.forEach(walk);
      else if (key === "const") found.zero ||= value === 0;
      else if (key !== "items" && !(key === "type" && value === "null")) found[key] ??= value;
    }
  };
  walk(schema);
  const low = found.minimum ?? found.exclusiveMinimum;
  const source = own?.[name] === undefined ? undefined : own.source;
  const limits = {
    default: own === null ? null : own?.[name] ?? found.default ?? null, source, min: low, max: found.maximum,
    isAbove: found.minimum === undefined && found.exclusiveMinimum !== undefined, zero: Boolean(found.zero),
  };
  if (name === "stop") return { kind: "lines", default: own?.stop ?? [], source, max: MAX_STOPS };
  if (found.enum) return { kind: "choice", values: found.enum, default: found.default ?? null };
  if (found.type === "boolean") return { kind: "boolean", default: Boolean(found.default) };
  return { kind: found.type === "integer" ? "integer" : "number", ...limits };
}

/** Why a value is outside a field's limits, as a key of the catalogue; "" if it is not.
 * @param {Field} field @param {any} value */
export function faultOf(field, value) {
  if (value === null || value === undefined || value === "") return "";
  if (field.kind === "lines") return value.length > (field.max ?? MAX_STOPS) ? "fault.many" : "";
  if (field.kind !== "number" && field.kind !== "integer") return "";
  if (typeof value !== "number" || !Number.isFinite(value)) return "fault.number";
  if (field.kind === "integer" && !Number.isInteger(value)) return "fault.integer";
  if (field.zero && value === 0) return "";
  if (field.min !== undefined && (field.isAbove ? value <= field.min : value < field.min)) return "fault.range";
  if (field.max !== undefined && value > field.max) return "fault.range";
  return "";
}

/** @param {string} text @returns {any} the JSON value of a text; undefined if it is none */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** @param {Conversation} conversation */
export function modelOf(conversation) {
  const wanted = conversation.sampling.model;
  return server.models.some((each) => each.id === wanted) ? wanted : server.current?.id ?? "";
}

/** How many tokens a model reads and writes together; null: it does not say. @param {string | undefined} model */
export function roomOf(model) {
  return server.models.find((each) => each.id === model)?.max_model_len ?? null;
}

/** The fields of a body that the settings give. @param {Conversation} conversation */
export function samplingOf(conversation) {
  /** @type {Record<string, any>} */
  const body = {};
  const model = modelOf(conversation);
  for (const name of SAMPLING) {
    const value = conversation.sampling[name];
    const field = fieldOf(name, model);
    if (value !== undefined && value !== null && value !== "" && !(field && faultOf(field, value))) {
      if (!(Array.isArray(value) && !value.length)) body[name] = value;
    }
  }
  const extra = parsed(conversation.sampling.extra ?? "");
  return extra && typeof extra === "object" && !Array.isArray(extra) ? { ...body, ...extra } : body;
}

/** Whether a call was written to its end. @param {import("./records.js").ToolCall} call */
export function isWhole(call) {
  const value = parsed(call.function.arguments);
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** Messages of a path as the API has them. A call that was cut goes as text: nobody
 * has answered it. @param {Message[]} path */
export function messagesOf(path) {
  return path.map((message) => {
    /** @type {Record<string, any>} */
    const each = { role: message.role, content: contentOf(message) };
    if (message.role === "tool") each.tool_call_id = message.toolCallId;
    const whole = (message.toolCalls ?? []).filter(isWhole);
    for (const { function: cut } of (message.toolCalls ?? []).filter((call) => !isWhole(call))) {
      each.content += `{"name": ${JSON.stringify(cut.name)}, "arguments": ${cut.arguments}`;
    }
    if (whole.length) {
      each.tool_calls = whole;
      each.content ||= null;
    }
    return each;
  });
}

/** The body of a chat completion. @param {Conversation} conversation @param {Message[]} path
 * @param {string} [model] in place of the conversation's */
export function chatBody(conversation, path, model) {
  /** @type {Record<string, any>} */
  const body = { model: model ?? modelOf(conversation), messages: messagesOf(path), ...samplingOf(conversation) };
  if (conversation.forgets) body.truncation = "auto";
  if (conversation.system) body.messages.unshift({ role: "system", content: conversation.system });
  const tools = parsed(conversation.tools);
  if (Array.isArray(tools) && tools.length) {
    body.tools = tools;
    const isName = !["auto", "none", "required"].includes(conversation.toolChoice);
    body.tool_choice = isName ? { type: "function", function: { name: conversation.toolChoice } } : conversation.toolChoice;
  }
  const schema = parsed(conversation.schema);
  if (schema && typeof schema === "object") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

/** How the answer is sent. @param {boolean} isStreamed */
export function streaming(isStreamed) {
  if (!isStreamed) return { return_token_ids: true };
  return { stream: true, stream_options: { include_usage: true, include_status: true }, return_token_ids: true };
}

/** The body that goes on from token ids, so that the text has no seam.
 * @param {Conversation} conversation @param {number[]} ids @param {string} model
 * @param {number} numMade tokens that count towards the most that an answer may have */
export function completionBody(conversation, ids, model, numMade) {
  const { max_tokens: chosen, reasoning_effort: _, ...sampling } = samplingOf(conversation);
  const most = chosen ?? fieldOf("max_tokens", model)?.default;
  const room = roomOf(model) ?? ids.length + 256;
  const left = Math.max(1, room - ids.length);
  return { model, prompt: ids, ...sampling, max_tokens: Math.max(1, Math.min(most ? most - numMade : left, left)) };
}

/** Tools of a file: OpenAI's definitions, functions with their JSON Schema, or JSON Schemas of arguments; null where it has
 * none. @param {any} value @param {string} name of a schema that has none */
export function toolsOf(value, name) {
  const list = Array.isArray(value) ? value : Array.isArray(value?.tools) ? value.tools : [value];
  const tools = list.map((/** @type {any} */ each, /** @type {number} */ i) => {
    if (!each || typeof each !== "object") return null;
    if (each.type === "function" && typeof each.function?.name === "string") return each;
    const schema = each.parameters ?? each.inputSchema ?? each.input_schema ?? (each.properties ? each : null);
    if (!schema || typeof schema !== "object") return null;
    const called = String(each.name ?? each.title ?? (i ? `${name}_${i + 1}` : name)).replace(/[^\w-]+/g, "_").slice(0, 64);
    const { description } = each;
    return { type: "function", function: { name: called, ...(typeof description === "string" ? { description } : {}), parameters: schema } };
  });
  return tools.length && tools.every(Boolean) ? tools : null;
}
