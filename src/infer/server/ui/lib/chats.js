/** `chats`: the conversations of this reader, the one that is open, and the answers in the making. */

import { ApiError, askJson, server } from "./api.js";
import { Generation } from "./generation.js";
import { Tree, newConversation, newId, titleOf } from "./records.js";
import { chatBody, completionBody, modelOf, parsed, streaming } from "./request.js";
import { addTurn, listSessions, noteKept, prepareSession, readSession, removeSession, renameSession } from "./sessions.js";
import { storage } from "./storage.js";
import { keep, recall } from "./local.js";
import { settledIds } from "./token_text.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */
/** @typedef {import("./records.js").TextFile} TextFile */

class Chats extends EventTarget {
  constructor() {
    super();
    /** @type {Map<string, Conversation>} */
    this.all = new Map();
    /** @type {Tree | null} */
    this.tree = null;
    /** Answers in the making, by the id of their message. @type {Map<string, Generation>} */
    this.running = new Map();
    /** Trees of conversations with running answers. @type {Map<string, Tree>} */
    this._busy = new Map();
    /** What is typed and not sent, by conversation. @type {Map<string, {text: string, files: TextFile[]}>} */
    this.drafts = new Map();
    /** The latest traces of answers that have ended, with their time. @type {Array<[any, number]>} */
    this.traces = [];
    /** Why the last message of a conversation was not taken. @type {Map<string, ApiError>} */
    this.errors = new Map();
    this.isLoaded = false;
    /** Whether another conversation is being opened. */
    this.isOpening = false;
    storage.addEventListener("problem", () => this.changed());
    storage.addEventListener("elsewhere", () => void this._reload());
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  get current() {
    return this.tree?.conversation ?? null;
  }

  /** Running answers of a conversation. @param {string} id */
  isBusy(id) {
    return this._busy.has(id);
  }

  /** Read the list, and open a conversation or a new one. @param {string} id */
  async load(id) {
    await this._readList();
    this.isLoaded = true;
    await this.open(id);
  }

  async _readList() {
    const found = await storage.conversations();
    const sessions = recall("hasSessions", false) ? await listSessions().catch(() => null) : null;
    const kept = sessions ? [] : [...this.all.values()].filter((each) => each.session);
    const own = [...this._busy.values()].map((tree) => tree.conversation);
    const fresh = [...found, ...kept, ...(sessions ?? []), ...own];
    this.all = new Map(fresh.map((each) => [each.id, each]));
    const now = this.tree?.conversation;
    const known = now && this.all.get(now.id);
    if (now && known && known !== now) this.all.set(now.id, known.session ? now : Object.assign(now, known));
  }

  /** Another tab has written. */
  async _reload() {
    await this._readList();
    const now = this.tree?.conversation;
    if (now && !this.isBusy(now.id)) {
      if (this.all.has(now.id)) await this._read(now);
      else if (this.tree?.byId.size) await this.open("");
    }
    this.changed();
  }

  /** @param {Conversation} conversation */
  async _read(conversation) {
    const busy = this._busy.get(conversation.id);
    if (busy) this.tree = busy;
    else {
      const messages = conversation.session ? await readSession(conversation) : await storage.messages(conversation.id);
      this.tree = new Tree(conversation, messages);
      await this._markLost(messages);
    }
  }

  /** Answers whose tab has gone: nobody fills them any more.
   * @param {Message[]} messages */
  async _markLost(messages) {
    for (const each of messages.filter((message) => message.finish === "running")) {
      const isElsewhere = navigator.locks
        ? await navigator.locks.request(`infer-${each.id}`, { ifAvailable: true }, (lock) => lock === null)
        : Date.now() - (each.figures?.startedAt ?? 0) < 5000;
      if (!isElsewhere) each.finish = "lost";
    }
  }

  /** Open a conversation; "" or an unknown id opens a new one. @param {string} id */
  async open(id) {
    const known = this.all.get(id);
    if (known) {
      this.isOpening = true;
      try {
        await this._read(known);
      } catch (error) {
        this.tree = new Tree(known, []);
        this.errors.set(known.id, error instanceof ApiError ? error : new ApiError("failed", String(error)));
      } finally {
        this.isOpening = false;
      }
    } else if (!this.current || this.all.has(this.current.id)) {
      const last = recall("defaults", /** @type {Record<string, any>} */ ({}));
      this.tree = new Tree(newConversation({ sampling: { ...last } }), []);
    }
    this.changed();
  }

  /** Write the settings of the open conversation. New ones begin with its sampling. */
  async keepSettings() {
    const now = this.current;
    if (!now) return;
    keep("defaults", now.sampling);
    await this._write(now);
    this.changed();
  }

  /** @param {Conversation | null} conversation @param {Message[]} [messages] */
  async _write(conversation, messages = []) {
    if (conversation && !this.all.has(conversation.id)) return;
    const isSession = conversation ? conversation.session : this.all.get(messages[0]?.conversation)?.session;
    if (!isSession) await storage.write(conversation, messages);
  }

  /** @param {Conversation} conversation @param {string} title */
  async rename(conversation, title) {
    conversation.title = titleOf(title) || conversation.title;
    if (conversation.session) await renameSession(conversation);
    await this._write(conversation);
    this.changed();
  }

  /** @param {Conversation} conversation */
  async pin(conversation) {
    conversation.pinned = !conversation.pinned;
    if (conversation.session) {
      const pinned = recall("pinnedSessions", /** @type {string[]} */ ([])).filter((id) => id !== conversation.session);
      keep("pinnedSessions", conversation.pinned ? [...pinned, conversation.session] : pinned);
    }
    await this._write(conversation);
    this.changed();
  }

  /** @param {Conversation} conversation */
  async remove(conversation) {
    for (const each of this.running.values()) {
      if (each.message.conversation === conversation.id) each.stop();
    }
    if (conversation.session) await removeSession(conversation);
    else await storage.removeConversation(conversation.id);
    this.all.delete(conversation.id);
    if (this.current?.id === conversation.id) await this.open("");
    this.changed();
  }

  /** @param {Tree} tree @param {string | null} parent @param {Message["role"]} role
   * @param {Partial<Message>} fields @returns {Message} */
  _new(tree, parent, role, fields) {
    const message = { id: newId(), conversation: tree.conversation.id, parent, role, content: "", created: Date.now(), ...fields };
    tree.add(message);
    tree.choose(message);
    return message;
  }

  /** Send a message below the shown leaf, or below `parent` in place of a sibling.
   * @param {string} text @param {TextFile[]} files @param {string | null} [parent] */
  async send(text, files, parent) {
    const tree = this.tree;
    if (!tree) return;
    const before = { ...tree.conversation.chosen };
    const above = parent === undefined ? tree.path().at(-1)?.id ?? null : parent;
    const question = this._new(tree, above, "user", { content: text, ...(files.length ? { files } : {}) });
    if (!tree.conversation.title) tree.conversation.title = titleOf(text || files[0]?.name || "");
    const given = () => {
      tree.remove(question);
      if (!this.all.has(tree.conversation.id)) tree.conversation.title = "";
      tree.conversation.chosen = before;
      this.drafts.set(tree.conversation.id, { text, files });
    };
    await this._answer(tree, question, given);
  }

  /** Give the results of the calls of an answer, and go on.
   * @param {Message} asked @param {Array<{id: string, text: string}>} results */
  async sendResults(asked, results) {
    const tree = this.tree;
    if (!tree) return;
    let above = asked;
    const added = results.map(({ id, text }) => {
      above = this._new(tree, above.id, "tool", { content: text, toolCallId: id });
      return above;
    });
    await this._answer(tree, above, () => added.reverse().forEach((each) => tree.remove(each)));
  }

  /** Make an answer again, as a sibling. @param {Message} answer */
  async regenerate(answer) {
    const tree = this.tree;
    const question = tree?.byId.get(answer.parent ?? "");
    if (tree && question) await this._answer(tree, question, () => tree.choose(answer));
  }

  /** The answer to a message that has none. @param {Message} question */
  async answer(question) {
    if (this.tree) await this._answer(this.tree, question, () => {});
  }

  /** @param {Tree} tree @param {Message} question @param {() => void} undo */
  async _answer(tree, question, undo) {
    const { conversation } = tree;
    if (conversation.session || (recall("newOnServer", false) && !this.all.has(conversation.id))) {
      if (!(await this._isReady(tree, question, undo))) return;
    }
    const path = tree.pathTo(question);
    const body = { ...chatBody(conversation, path), ...streaming(conversation.sampling.stream !== false) };
    if (conversation.session) addTurn(conversation, body, path);
    const message = this._new(tree, question.id, "assistant", { schema: parsed(conversation.schema) ?? null });
    await this._run(tree, message, "/v1/chat/completions", body, 0, path.slice(-2), undo);
  }

  /** Whether the session of a conversation can take what ends with a message.
   * @param {Tree} tree @param {Message} last @param {() => void} undo */
  async _isReady(tree, last, undo) {
    try {
      await prepareSession(tree, last);
      this.all.set(tree.conversation.id, tree.conversation);
      return true;
    } catch (error) {
      undo();
      this._refused(tree.conversation, error);
      return false;
    }
  }

  /** Go on where an answer broke off, or from token ids of the reader's choice, as a sibling.
   * @param {Message} answer @param {{ids: number[], text: string}} [from] */
  async goOn(answer, from) {
    const tree = this.tree;
    if (!tree) return;
    const { conversation } = tree;
    let ids = from?.ids ?? answer.tokenIds ?? [];
    const isExact = answer.promptIds?.length && ids.length && !answer.reasoning && !answer.toolCalls?.length && !conversation.session;
    if (from && !isExact) return;
    const undo = () => tree.choose(answer);
    if (!isExact) {
      await this._goOnFromText(tree, answer, undo);
      return;
    }
    const prompt = /** @type {number[]} */ (answer.promptIds);
    const text = from?.text ?? answer.content;
    const asked = answer.figures?.model ?? "";
    const isThere = !server.models.length || server.models.some((each) => each.id === asked);
    const model = asked && isThere ? asked : modelOf(conversation);
    if (!from && answer.finish !== "length") ids = await settledIds(model, ids, answer.content);
    if (this.isBusy(conversation.id)) return;
    const message = this._new(tree, answer.parent, "assistant", { content: text, promptIds: prompt, tokenIds: [...ids] });
    const numMade = from || answer.finish === "length" ? 0 : ids.length;
    const body = { ...completionBody(conversation, [...prompt, ...ids], model, numMade), ...streaming(true) };
    await this._run(tree, message, "/v1/completions", body, ids.length, [], undo);
  }

  /** Go on where the text of an answer ends. A session has one version of it.
   * @param {Tree} tree @param {Message} answer @param {() => void} undo */
  async _goOnFromText(tree, answer, undo) {
    if (tree.conversation.session && !(await this._isReady(tree, answer, undo))) return;
    const { conversation } = tree;
    const path = tree.pathTo(answer);
    const body = { ...chatBody(conversation, path), ...streaming(true), continue_final_message: true };
    if (conversation.session) addTurn(conversation, body, path);
    const message = this._new(tree, answer.parent, "assistant", { content: answer.content });
    const begun = conversation.session ? () => tree.remove(tree.byId.get(answer.id) ?? answer) : undefined;
    await this._run(tree, message, "/v1/chat/completions", body, 0, [], undo, begun);
  }

  /** @param {Tree} tree @param {Message} message @param {string} path @param {Record<string, any>} body
   * @param {number} numGiven @param {Message[]} before messages to keep with it @param {() => void} undo
   * @param {() => void} [begun] what is done once the server has taken the request */
  async _run(tree, message, path, body, numGiven, before, undo, begun) {
    const { conversation } = tree;
    const generation = new Generation(message, path, body, (each) => void this._write(null, [each]));
    generation.numGiven = numGiven;
    message.finish = "running";
    this.running.set(message.id, generation);
    this._busy.set(conversation.id, tree);
    this.errors.delete(conversation.id);
    generation.addEventListener("begin", () => {
      begun?.();
      conversation.updated = Date.now();
      this.all.set(conversation.id, conversation);
      void this._write(conversation, [...before, message]);
      this.changed();
    });
    this.changed();
    const run = () => generation.run();
    try {
      if (navigator.locks) await navigator.locks.request(`infer-${message.id}`, run);
      else await run();
      if (!generation.hasBegun) this._takeBack(tree, message, undo);
      else void this._readTrace(message);
      if (conversation.session) noteKept(tree, message);
    } catch (error) {
      this._takeBack(tree, message, undo);
      this._refused(conversation, error);
    } finally {
      this.running.delete(message.id);
      const isBusy = [...this.running.values()].some((each) => each.message.conversation === conversation.id);
      if (!isBusy) this._busy.delete(conversation.id);
      this.changed();
      this.dispatchEvent(new CustomEvent("ended", { detail: message }));
    }
  }

  /** Take the time of decoding and the restarts from the server's trace: the browser's clock sees
   * when pieces were read, which is late and all at once while the page is busy.
   * @param {Message} message */
  async _readTrace(message) {
    const { figures } = message;
    if (!figures?.requestId) return;
    const query = figures.model ? `?model=${encodeURIComponent(figures.model)}` : "";
    const read = () => askJson(`/v1/requests/${encodeURIComponent(figures.requestId)}${query}`).catch(() => null);
    let trace = await read();
    if (trace?.total_ms === null) {
      await new Promise((done) => setTimeout(done, 200));
      trace = await read();
    }
    if (!trace) return;
    this.traces = [...this.traces.slice(-19), [trace, figures.startedAt]];
    if (trace.first_token_ms && trace.total_ms) figures.decodeMs = trace.total_ms - trace.first_token_ms;
    if (trace.restarts) figures.restarts = trace.restarts;
    await this._write(null, [message]);
    this.changed();
  }

  /** @param {Tree} tree @param {Message} message @param {() => void} undo */
  _takeBack(tree, message, undo) {
    tree.remove(message);
    undo();
  }

  /** @param {Conversation} conversation @param {unknown} error */
  _refused(conversation, error) {
    const known = error instanceof ApiError ? error : new ApiError("failed", String(error));
    this.errors.set(conversation.id, known);
    if (known.kind === "model" || known.kind === "busy" || known.kind === "offline") void server.refresh();
    this.changed();
  }

  /** Put a text of the reader's own in place of an answer, as a sibling.
   * @param {Message} answer @param {string} content */
  async replace(answer, content) {
    const { tree } = this;
    if (!tree || tree.conversation.session) return;
    const message = this._new(tree, answer.parent, answer.role, {
      content, ...(answer.toolCallId ? { toolCallId: answer.toolCallId } : {}),
    });
    await this._write(tree.conversation, [message]);
    this.changed();
  }

  /** Show another sibling. @param {Message} message */
  async choose(message) {
    this.tree?.choose(message);
    await this._write(this.current);
    this.changed();
  }

  stopAll() {
    for (const each of this.running.values()) {
      if (each.message.conversation === this.current?.id) each.stop();
    }
  }

  /** How many tokens a text would add to the open conversation's prompt, and the model's limit.
   * @param {string} text @param {TextFile[]} files @param {AbortSignal} signal */
  async measure(text, files, signal) {
    const tree = /** @type {Tree} */ (this.tree);
    const draft = { id: "", conversation: "", parent: null, role: /** @type {const} */ ("user"), content: text, created: 0, files };
    const body = chatBody(tree.conversation, [...tree.path(), draft]);
    const { model, messages, tools } = body;
    const found = await askJson("/v1/chat/completions/render", { body: { model, messages, ...(tools ? { tools } : {}) }, signal });
    return { count: /** @type {number} */ (found.count), limit: /** @type {number} */ (found.max_model_len) };
  }
}

export const chats = new Chats();
