/** Conversations and their messages. A conversation is a tree: every message has a parent, and a
 * message that was edited or made again has siblings. */

/** @typedef {{name: string, size: number, text: string}} TextFile */
/** @typedef {{id: string, type: "function", function: {name: string, arguments: string}}} ToolCall */
/** @typedef {{requestId: string, model: string, promptTokens: number, cachedTokens: number,
 *   completionTokens: number, firstMs: number | null, totalMs: number | null,
 *   decodeMs?: number, restarts?: number, truncated?: number, startedAt: number}} Figures decodeMs: from the first to the
 *   last token, by the server's clock; restarts: of the engine, which the answer survived; truncated:
 *   the oldest messages that the prompt was without */
/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversation
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {number} created
 * @property {string} [reasoning]
 * @property {ToolCall[]} [toolCalls]
 * @property {string} [toolCallId]
 * @property {TextFile[]} [files]
 * @property {number[]} [promptIds] token ids of the prompt that was answered
 * @property {number[]} [tokenIds] token ids of the answer
 * @property {string} [finish] OpenAI's reason; or "stopped", "lost", "error", "running"
 * @property {string} [problem] what the server said where the answer broke off
 * @property {Figures} [figures]
 * @property {object | null} [schema] the JSON schema that the answer was to fit
 * @property {string} [together] answers that were made at once, and none of which was chosen yet, have the same
 * @property {{name: string, at: number, numGiven: number}} [resume] how a running answer is found at the server: the
 *   request's name, and the number of the last event that is in the message
 * @property {boolean} [isKept] whether the server's session has it
 */
/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} created
 * @property {number} updated
 * @property {boolean} pinned
 * @property {string} system
 * @property {string} tools definitions as JSON
 * @property {string} toolChoice
 * @property {string} schema JSON schema of the answers
 * @property {Record<string, any>} sampling
 * @property {Record<string, string>} chosen by parent ("" = the root): the child that is shown
 * @property {string} [origin] id of the conversation that it was imported from
 * @property {boolean} [forgets] whether the oldest messages are left out where the context is full
 * @property {string} [session] id of the server's session, where it is kept there
 */

let last = 0;

/** An id that no other record has; later ones sort after earlier ones. */
export function newId() {
  last = Math.max(last + 1, Date.now());
  const random = crypto.getRandomValues(new Uint8Array(8));
  return last.toString(36).padStart(9, "0") + Array.from(random, (b) => b.toString(16).padStart(2, "0")).join("");
}

/** @param {Partial<Conversation>} [fields] @returns {Conversation} */
export function newConversation(fields = {}) {
  const now = Date.now();
  return {
    id: newId(), title: "", created: now, updated: now, pinned: false, system: "", tools: "",
    toolChoice: "auto", schema: "", sampling: {}, chosen: {}, ...fields,
  };
}

/** The messages of a conversation by their place in the tree. */
export class Tree {
  /** @param {Conversation} conversation @param {Message[]} messages */
  constructor(conversation, messages) {
    this.conversation = conversation;
    /** @type {Map<string, Message>} */
    this.byId = new Map();
    /** @type {Map<string, Message[]>} */
    this._children = new Map();
    /** Number of messages of the server's session, without the system prompt. */
    this.numKept = messages.filter((each) => each.isKept).length;
    /** Whether an answer of the session broke off, so that the server may have it or not. */
    this.isUnsure = false;
    for (const message of [...messages].sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1))) {
      this.add(message);
    }
  }

  /** @param {Message} message */
  add(message) {
    this.byId.set(message.id, message);
    const key = message.parent ?? "";
    const siblings = this._children.get(key);
    if (siblings) siblings.push(message);
    else this._children.set(key, [message]);
  }

  /** @param {Message} message */
  remove(message) {
    this.byId.delete(message.id);
    const key = message.parent ?? "";
    this._children.set(key, (this._children.get(key) ?? []).filter((each) => each !== message));
    if (this.conversation.chosen[key] === message.id) delete this.conversation.chosen[key];
  }

  /** @param {string | null} parent */
  children(parent) {
    return this._children.get(parent ?? "") ?? [];
  }

  /** The child that is shown: the chosen one, else the newest. @param {string | null} parent */
  shown(parent) {
    const children = this.children(parent);
    const chosen = this.conversation.chosen[parent ?? ""];
    return children.find((each) => each.id === chosen) ?? children.at(-1);
  }

  /** The messages from the first one to the shown leaf. */
  path() {
    /** @type {Message[]} */
    const path = [];
    /** @type {Set<string>} */
    const seen = new Set();
    let next = this.shown(null);
    while (next && !seen.has(next.id)) {
      seen.add(next.id);
      path.push(next);
      next = this.shown(next.id);
    }
    return path;
  }

  /** The messages from the first one to this one. @param {Message | null} message */
  pathTo(message) {
    /** @type {Message[]} */
    const path = [];
    while (message && !path.includes(message)) {
      path.unshift(message);
      message = this.byId.get(message.parent ?? "") ?? null;
    }
    return path;
  }

  /** Show a message instead of its siblings. @param {Message} message */
  choose(message) {
    this.conversation.chosen[message.parent ?? ""] = message.id;
  }

  /** A message and all below it. @param {Message} message @returns {Message[]} */
  below(message) {
    const found = [message];
    for (let i = 0; i < found.length; i++) found.push(...this.children(found[i].id));
    return found;
  }
}

/** A title from the first words of a text. @param {string} text */
export function titleOf(text) {
  const line = plainLine(text);
  return line.length > 60 ? `${Array.from(line).slice(0, 59).join("")}…` : line;
}

/** One line without control characters and without those that turn the direction of writing.
 * @param {string} text */
export function plainLine(text) {
  // eslint-disable-next-line no-control-regex
  return text.slice(0, 2000).replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]+/g, " ")
    .replace(/[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "").replace(/ +/g, " ").trim();
}

/** Tokens a second after the first one; null where there are too few. @param {Figures} figures */
export function speedOf({ completionTokens, decodeMs, firstMs, totalMs }) {
  const ms = decodeMs ?? (totalMs ?? 0) - (firstMs ?? totalMs ?? 0);
  return completionTokens > 1 && ms > 0 ? ((completionTokens - 1) / ms) * 1000 : null;
}

/** The content of a message as the model gets it: the text, and its files before it.
 * @param {Message} message */
export function contentOf(message) {
  const files = (message.files ?? []).map((file) => {
    const longest = Math.max(2, ...Array.from(file.text.matchAll(/`+/g), (found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}\n${fence}\n${file.text}\n${fence}\n\n`;
  });
  return files.join("") + message.content;
}
