/** Conversations in IndexedDB. Where that is forbidden or full, in memory, and `problem` says so. */

import { openDB } from "../vendor/core.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */

const NAME = "infer";
const VERSION = 2;

class Storage extends EventTarget {
  constructor() {
    super();
    /** Why conversations are not kept: "" or "forbidden" or "full". */
    this.problem = "";
    /** Ids of records that could not be read. @type {string[]} */
    this.damaged = [];
    /** @type {Map<string, Conversation>} */
    this._conversations = new Map();
    /** @type {Map<string, Message>} */
    this._messages = new Map();
    /** @type {Promise<import("idb").IDBPDatabase<any> | null> | null} */
    this._opening = null;
    this._channel = "BroadcastChannel" in window ? new BroadcastChannel("infer") : null;
    this._channel?.addEventListener("message", (event) => {
      this.dispatchEvent(new CustomEvent("elsewhere", { detail: String(event.data) }));
    });
  }

  _database() {
    this._opening ??= (async () => {
      try {
        return await openDB(NAME, VERSION, {
          upgrade(database, before) {
            if (before < 1) {
              database.createObjectStore("conversations", { keyPath: "id" });
              database.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
            }
            if (before < 2) database.createObjectStore("drafts", { keyPath: "id" });
          },
          blocking: (_now, _next, event) => /** @type {IDBDatabase} */ (event.target).close(),
          terminated: () => { this._opening = null; },
        });
      } catch {
        this._fail("forbidden");
        return null;
      }
    })();
    return this._opening;
  }

  /** @param {string} problem */
  _fail(problem) {
    if (this.problem === problem) return;
    this.problem = problem;
    this.dispatchEvent(new Event("problem"));
  }

  /** @returns {Promise<Conversation[]>} */
  async conversations() {
    const found = [...this._conversations.values()];
    const database = await this._database();
    if (!database) return found;
    const known = new Set(found.map((each) => each.id));
    for (const each of await database.getAll("conversations")) {
      if (!isConversation(each)) this.damaged.push(String(each?.id));
      else if (!known.has(each.id)) found.push(each);
    }
    return found;
  }

  /** @param {string} id @returns {Promise<Message[]>} */
  async messages(id) {
    const found = [...this._messages.values()].filter((each) => each.conversation === id);
    const database = await this._database();
    if (!database) return found;
    const known = new Set(found.map((each) => each.id));
    for (const each of await database.getAllFromIndex("messages", "conversation", id)) {
      if (!isMessage(each)) this.damaged.push(String(each?.id));
      else if (!known.has(each.id)) found.push(each);
    }
    return found;
  }

  /** Ids of the conversations with a message that has all words.
   * @param {string[]} words in lower case @param {AbortSignal} signal @returns {Promise<Set<string>>} */
  async matching(words, signal) {
    /** @type {Set<string>} */
    const found = new Set();
    /** @param {any} each */
    const look = (each) => {
      const text = String(each?.content ?? "").toLowerCase();
      if (words.every((word) => text.includes(word))) found.add(String(each.conversation));
    };
    this._messages.forEach(look);
    const database = await this._database();
    let cursor = await database?.transaction("messages").store.openCursor();
    while (cursor && !signal.aborted) {
      look(cursor.value);
      cursor = await cursor.continue();
    }
    return found;
  }

  /** Write records; those that do not fit stay in memory.
   * @param {Conversation | null} conversation @param {Message[]} [messages] */
  async write(conversation, messages = []) {
    const database = await this._database();
    if (database) {
      try {
        const change = database.transaction(["conversations", "messages"], "readwrite");
        if (conversation) void change.objectStore("conversations").put(conversation);
        for (const each of messages) void change.objectStore("messages").put(each);
        await change.done;
        if (conversation) this._conversations.delete(conversation.id);
        for (const each of messages) this._messages.delete(each.id);
        this._channel?.postMessage(conversation?.id ?? messages[0]?.conversation ?? "");
        return;
      } catch {
        this._fail("full");
      }
    }
    if (conversation) this._conversations.set(conversation.id, conversation);
    for (const each of messages) this._messages.set(each.id, each);
  }

  /** @param {string} id the conversation's @param {string[]} messages */
  async removeMessages(id, messages) {
    for (const each of messages) this._messages.delete(each);
    const database = await this._database();
    if (!database) return;
    const change = database.transaction("messages", "readwrite");
    for (const each of messages) void change.store.delete(each);
    await change.done;
    this._channel?.postMessage(id);
  }

  /** What was typed in a conversation and not sent. @param {string} id */
  async draft(id) {
    const found = await (await this._database())?.get("drafts", id).catch(() => null);
    return found && typeof found.text === "string" && areFiles(found.files ?? null)
      ? { text: /** @type {string} */ (found.text), files: /** @type {import("./records.js").TextFile[]} */ (found.files) } : null;
  }

  /** @param {string} id @param {{text: string, files: import("./records.js").TextFile[]} | null} draft null: there is none any more */
  async writeDraft(id, draft) {
    const database = await this._database();
    try {
      if (draft) await database?.put("drafts", { id, ...draft });
      else await database?.delete("drafts", id);
    } catch {
      this._fail("full");
    }
  }

  /** @param {string} id */
  async removeConversation(id) {
    void this.writeDraft(id, null);
    const messages = (await this.messages(id)).map((each) => each.id);
    this._conversations.delete(id);
    const database = await this._database();
    if (database) await database.delete("conversations", id);
    await this.removeMessages(id, messages);
  }
}

/** @param {any} each @returns {each is Conversation} */
export function isConversation(each) {
  const texts = ["id", "title", "system", "tools", "toolChoice", "schema"];
  return each !== null && typeof each === "object" && texts.every((name) => typeof each[name] === "string")
    && Number.isFinite(each.created) && Number.isFinite(each.updated) && typeof each.pinned === "boolean"
    && isObject(each.sampling) && isObject(each.chosen)
    && Object.values(each.chosen).every((value) => typeof value === "string");
}

/** @param {any} each @returns {each is Message} */
export function isMessage(each) {
  return each !== null && typeof each === "object" && typeof each.id === "string"
    && typeof each.conversation === "string" && (each.parent === null || typeof each.parent === "string")
    && ["user", "assistant", "tool"].includes(each.role) && typeof each.content === "string"
    && Number.isFinite(each.created)
    && ["reasoning", "toolCallId", "finish", "problem"].every((name) => ["undefined", "string"].includes(typeof each[name]))
    && areIds(each.promptIds) && areIds(each.tokenIds) && areCalls(each.toolCalls) && areFiles(each.files)
    && ["undefined", "string"].includes(typeof each.together)
    && (each.figures === undefined || isObject(each.figures)) && isResume(each.resume);
}

/** @param {any} each */
function isResume(each) {
  return each === undefined || (isObject(each) && /^[\w.-]{1,128}$/.test(each.name) && Number.isInteger(each.at) && Number.isInteger(each.numGiven));
}

/** @param {any} each */
function isObject(each) {
  return each !== null && typeof each === "object" && !Array.isArray(each);
}

/** @param {any} each */
function areIds(each) {
  return each === undefined || (Array.isArray(each) && each.every((id) => Number.isInteger(id) && id >= 0));
}

/** @param {any} each */
function areCalls(each) {
  return each === undefined || (Array.isArray(each) && each.every((call) => isObject(call)
    && typeof call.id === "string" && isObject(call.function)
    && typeof call.function.name === "string" && typeof call.function.arguments === "string"));
}

/** @param {any} each */
function areFiles(each) {
  return each === undefined || (Array.isArray(each) && each.every((file) => isObject(file)
    && typeof file.name === "string" && typeof file.text === "string" && Number.isFinite(file.size)));
}

export const storage = new Storage();
