/** Conversations that the server keeps (`/v1/sessions`), in the same form as the browser's own. */

import { askJson } from "./api.js";
import { keep, recall } from "./local.js";
import { Tree, newConversation } from "./records.js";

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
      created: conversation.created + messages.length, isKept: true,
      ...(each.tool_calls ? { toolCalls: each.tool_calls } : {}),
      ...(each.tool_call_id ? { toolCallId: each.tool_call_id } : {}),
    });
  }
  return messages;
}

/** Make a session for a conversation that has none. @param {Conversation} conversation */
async function startSession(conversation) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const made = await askJson("/v1/sessions", { body: { title: conversation.title, messages } });
  keep("hasSessions", true);
  conversation.session = String(made.id);
}

/** A session with the first messages of another one. @param {Conversation} conversation
 * @param {number} numMessages without the system prompt @returns {Promise<Conversation>} */
async function forkSession(conversation, numMessages) {
  const at = numMessages + (conversation.system ? 1 : 0);
  const path = `/v1/sessions/${encodeURIComponent(conversation.session ?? "")}/fork`;
  const made = await askJson(path, { body: { at } });
  return { ...conversation, ...conversationOf(made), title: conversation.title, system: conversation.system, sampling: conversation.sampling };
}

/** Let the session of a conversation take what ends with a message. A session is a line: before
 * another branch it is forked.
 * @param {Tree} tree @param {Message} last what is answered, or the answer that goes on */
export async function prepareSession(tree, last) {
  const { conversation } = tree;
  if (!conversation.session) {
    await startSession(conversation);
    conversation.id = `s-${conversation.session}`;
    for (const each of tree.byId.values()) each.conversation = conversation.id;
    return;
  }
  if (tree.isUnsure) await settle(tree);
  const path = tree.pathTo(last);
  // An answer that goes on takes the place of the session's last one.
  const numTaken = last.role === "assistant" && tree.numKept === path.length ? 1 : 0;
  if (numSame(path) === tree.numKept - numTaken) return;
  const fork = await forkSession(conversation, numSame(path));
  const copies = path.map((each, i) => ({ ...each, conversation: fork.id, isKept: i < numSame(path) }));
  Object.assign(tree, new Tree(fork, copies));
}

/** Ask the server which messages of a session it has, after an answer that broke off.
 * @param {Tree} tree */
async function settle(tree) {
  const found = await readSession(tree.conversation);
  for (const [i, each] of tree.path().entries()) {
    each.isKept = found[i]?.role === each.role && (each.role !== "assistant" || found[i].content === each.content);
    if (!each.isKept) break;
  }
  tree.numKept = found.length;
  tree.isUnsure = false;
}

/** The server writes a turn of a session when the answer is whole. @param {Tree} tree @param {Message} answer */
export function noteKept(tree, answer) {
  if (["stopped", "lost", "error"].includes(answer.finish ?? "")) {
    tree.isUnsure = true;
    return;
  }
  const path = tree.pathTo(answer);
  for (const each of path) each.isKept = true;
  tree.numKept = path.length;
}

/** The number of messages at the begin of a path that the session has; the last one is to be sent.
 * @param {Message[]} path */
function numSame(path) {
  const at = path.findIndex((each) => !each.isKept);
  return Math.min(at < 0 ? path.length : at, path.length - 1);
}

/** Let a body name the session, with its new messages only.
 * @param {Conversation} conversation @param {Record<string, any>} body @param {Message[]} path */
export function addTurn(conversation, body, path) {
  body.messages = body.messages.slice(numSame(path) - path.length);
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
