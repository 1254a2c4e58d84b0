/** Conversations as files: our JSON, llama.cpp's export, and Markdown. */

import { contentOf, newConversation, newId, plainLine } from "./records.js";
import { isConversation, isMessage, storage } from "./storage.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */

const FORMAT = "infer-conversations";

/** @param {Conversation[]} conversations @returns {Promise<string>} */
export async function exported(conversations) {
  const list = [];
  for (const conversation of conversations.filter((each) => !each.session)) {
    list.push({ conversation, messages: await storage.messages(conversation.id) });
  }
  return JSON.stringify({ format: FORMAT, version: 1, conversations: list }, null, 1);
}

/** A path of messages as Markdown. @param {string} title @param {Message[]} path
 * @param {(role: string) => string} nameOf */
export function asMarkdown(title, path, nameOf) {
  const parts = path.map((message) => `## ${nameOf(message.role)}\n\n${contentOf(message)}\n`);
  return [`# ${plainLine(title)}\n`, ...parts].join("\n");
}

/** Read a file's text. Throws `Error` where it has no conversations; those that are damaged are
 * named in `leftOut`. Nothing is written.
 * @param {string} text */
export function imported(text) {
  const value = JSON.parse(text);
  const list = value?.format === FORMAT ? value.conversations : Array.isArray(value) ? value : [value];
  if (!Array.isArray(list)) throw new Error("conversations");
  /** @type {Array<{conversation: Conversation, messages: Message[], origin: string}>} */
  const found = [];
  /** @type {string[]} */
  const leftOut = [];
  for (const [i, each] of list.entries()) {
    const read = value?.format === FORMAT ? ownOf(each) : llamaOf(each);
    const name = each?.conversation?.title ?? each?.conv?.name ?? each?.conversation?.id;
    if (read) found.push({ ...read, origin: String(each.conversation?.origin ?? each.conversation?.id ?? each.conv?.id ?? "") });
    else leftOut.push(plainLine(String(name ?? `#${i + 1}`)).slice(0, 60) || `#${i + 1}`);
  }
  if (!found.length && !leftOut.length) throw new Error("conversations");
  return { found, leftOut };
}

/** Whether this browser has a conversation with all messages of another one, which comes from the same.
 * @param {{messages: Message[], origin: string}} read @param {Conversation[]} all */
export async function isHere({ messages, origin }, all) {
  const keyOf = (/** @type {Message} */ each) => `${each.role} ${each.created} ${each.content}`;
  for (const each of all.filter((other) => origin && (other.id === origin || other.origin === origin))) {
    const there = new Set((await storage.messages(each.id)).map(keyOf));
    if (messages.every((message) => there.has(keyOf(message)))) return true;
  }
  return false;
}

/** @param {any} each */
function ownOf(each) {
  const { conversation, messages } = each ?? {};
  if (!isConversation(conversation) || !Array.isArray(messages) || !messages.every(isMessage)) return null;
  return renamed(conversation, messages);
}

/** A conversation under new ids, so that nothing of this browser is overwritten; null where its
 * messages are no tree. @param {Conversation} old @param {Message[]} messages */
function renamed(old, messages) {
  /** @type {Map<string, string>} */
  const ids = new Map();
  for (const each of messages) ids.set(each.id, newId());
  if (ids.size !== messages.length || !isTree(messages)) return null;
  const { id: _, session: _s, ...rest } = old;
  const chosen = Object.fromEntries(Object.entries(old.chosen).flatMap(([parent, child]) => {
    const [to, below] = [parent ? ids.get(parent) : "", ids.get(child)];
    return to === undefined || below === undefined ? [] : [[to, below]];
  }));
  const conversation = newConversation({ ...rest, chosen });
  const moved = messages.map(({ resume: _r, ...each }) => ({
    ...each, ...(each.finish === "running" ? { finish: "lost" } : {}), id: /** @type {string} */ (ids.get(each.id)), conversation: conversation.id,
    parent: each.parent === null ? null : /** @type {string} */ (ids.get(each.parent)),
  }));
  return { conversation, messages: moved };
}

/** Whether every parent is there and none is below itself. @param {Message[]} messages */
function isTree(messages) {
  const parents = new Map(messages.map((each) => [each.id, each.parent]));
  /** @type {Set<string>} */
  const good = new Set();
  for (const { id } of messages) {
    const way = [];
    /** @type {string | null | undefined} */
    let at = id;
    while (at !== null && at !== undefined && !good.has(at)) {
      if (way.length > messages.length || !parents.has(at)) return false;
      way.push(at);
      at = parents.get(at);
    }
    way.forEach((each) => good.add(each));
  }
  return true;
}

/** llama.cpp's web UI: `{conv: {id, name, currNode, lastModified}, messages: [{id, parent, role,
 * content, timestamp, type}]}`.
 * @param {any} each */
function llamaOf(each) {
  const { conv, messages } = each ?? {};
  if (!conv || typeof conv.name !== "string" || !Array.isArray(messages)) return null;
  const known = messages.filter((/** @type {any} */ message) => message?.type !== "root" && ["user", "assistant"].includes(message?.role));
  const ids = new Set(known.map((/** @type {any} */ message) => message.id));
  if (!known.every((/** @type {any} */ message) => typeof message.id === "string" && typeof message.content === "string")) return null;
  const system = messages.find((/** @type {any} */ message) => message?.role === "system" && typeof message.content === "string");
  const own = known.map((/** @type {any} */ message, /** @type {number} */ i) => ({
    id: message.id, conversation: "", parent: ids.has(message.parent) ? message.parent : null,
    role: message.role, content: message.content, created: Number(message.timestamp) || i,
    ...(typeof message.reasoningContent === "string" && message.reasoningContent ? { reasoning: message.reasoningContent } : {}),
  }));
  const chosen = {};
  const parents = new Map(own.map((message) => [message.id, message.parent]));
  for (let at = conv.currNode, steps = 0; typeof at === "string" && ids.has(at) && steps <= own.length; steps++) {
    /** @type {Record<string, string>} */ (chosen)[parents.get(at) ?? ""] = at;
    at = parents.get(at);
  }
  const updated = Number(conv.lastModified) || Date.now();
  return renamed(newConversation({ title: conv.name, updated, created: updated, chosen, system: system?.content ?? "" }), own);
}
