/** Conversations that the server keeps (`/v1/sessions`), in the same form as the browser's own. */

import { askJson } from "./api.js";
import { keep, recall } from "./local.js";
import { newConversation } from "./records.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */

/** @param {any} found a session without its messages @returns {Conversation} */
function conversationOf(found) {
  const pinned = recall("pinnedSessions", /** @type {string[]} */ ([]));
  const sampling = recall("defaults", /** @type {Record<string, any>} */ ({}));
  return newConversation({
    id: `s-${found.id}`, session: String(found.id), title: String(found.title ?? ""),
    created: 1000 * (found.created ?? 0), updated: 1000 * (found.updated ?? found.created ?? 0),
    pinned: pinned.includes(found.id), sampling: { ...sampling },
  });
}

/** @returns {Promise<Conversation[]>} */
export async function listSessions() {
  return (await askJson("/v1/sessions")).data.map(conversationOf);
}

/** The messages of a session, one below the other. @param {Conversation} conversation
 * @returns {Promise<Message[]>} */
export async function readSession(conversation) {
  const found = await askJson(`/v1/sessions/${encodeURIComponent(conversation.session ?? "")}`);
  /** @type {Message[]} */
  const messages = [];
  for (const each of found.messages) {
    const content = Array.isArray(each.content) ? each.content.map((/** @type {any} */ part) => part.text).join("") : each.content;
    if (each.role === "system" || each.role === "developer") {
      conversation.system = String(content ?? "");
      continue;
    }
    messages.push({
      id: `${conversation.id}-${messages.length}`, conversation: conversation.id,
      parent: messages.at(-1)?.id ?? null, role: each.role, content: String(content ?? ""),
      created: conversation.created + messages.length,
      ...(each.tool_calls ? { toolCalls: each.tool_calls } : {}),
      ...(each.tool_call_id ? { toolCallId: each.tool_call_id } : {}),
    });
  }
  return messages;
}

/** Make a session for a conversation that has none. @param {Conversation} conversation */
export async function startSession(conversation) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const made = await askJson("/v1/sessions", { body: { title: conversation.title, messages } });
  keep("hasSessions", true);
  conversation.session = String(made.id);
}

/** A session with the first messages of another one. @param {Conversation} conversation
 * @param {number} numMessages without the system prompt @returns {Promise<Conversation>} */
export async function forkSession(conversation, numMessages) {
  const at = numMessages + (conversation.system ? 1 : 0);
  const path = `/v1/sessions/${encodeURIComponent(conversation.session ?? "")}/fork`;
  const made = await askJson(path, { body: { at } });
  return { ...conversation, ...conversationOf(made), title: conversation.title, system: conversation.system, sampling: conversation.sampling };
}

/** Let a body name the session, with its new messages only.
 * @param {Conversation} conversation @param {Record<string, any>} body @param {Message[]} path */
export function addTurn(conversation, body, path) {
  let numNew = 0;
  while (numNew < path.length && path.at(-1 - numNew)?.role !== "assistant") numNew++;
  body.messages = body.messages.slice(-numNew);
  body.session_id = conversation.session;
}

/** @param {Conversation} conversation */
export async function renameSession(conversation) {
  await askJson(`/v1/sessions/${encodeURIComponent(conversation.session ?? "")}`, { method: "PATCH", body: { title: conversation.title } });
}

/** @param {Conversation} conversation */
export async function removeSession(conversation) {
  await askJson(`/v1/sessions/${encodeURIComponent(conversation.session ?? "")}`, { method: "DELETE" });
}
