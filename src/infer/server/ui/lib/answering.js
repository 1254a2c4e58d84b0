/** `Answering`: what is asked in a conversation, and the answers in the making. `Chats` adds the conversations. */

import { ApiError, askJson, server } from "./api.js";
import { Generation } from "./generation.js";
import { newId, titleOf } from "./records.js";
import { chatBody, completionBody, modelOf, parsed, streaming } from "./request.js";
import { recall } from "./local.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */
/** @typedef {import("./records.js").TextFile} TextFile */
/** @typedef {import("./records.js").Tree} Tree */
/** @typedef {{numGiven?: number, before?: Message[], undo: () => void, begun?: () => void}} How
 * token ids that the answer has already; messages to keep with it; what is done if the server refuses, and once it has
 * taken the request */

/** Most traces that are remembered. */
const MAX_TRACES = 20;
/** How many answers can be made at once. */
export const NUM_ANSWERS = [1, 2, 4];

/** What knows conversations on the server is loaded with the first of them. */
export const sessions = () => import("./sessions.js");

export class Answering extends EventTarget {
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
    /** The latest traces of answers that have ended, with their time. @type {Array<[any, number]>} */
    this.traces = [];
    /** Why the last message of a conversation was not taken. @type {Map<string, ApiError>} */
    this.errors = new Map();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  /** Write records. @param {Conversation | null} _conversation @param {Message[]} [_messages] @returns {Promise<void>} */
  async _write(_conversation, _messages) {}

  /** Forget messages of an answer that was refused. @param {Conversation} _conversation @param {Message[]} _messages */
  async _unwrite(_conversation, _messages) {}

  /** Keep what is typed and not sent. @param {string} _id @param {string} _text @param {TextFile[]} _files */
  keepDraft(_id, _text, _files) {}

  /** What is typed belongs to a conversation that has another id now. @param {string} _before @param {string} _after */
  _moveDraft(_before, _after) {}

  /** Running answers of a conversation. @param {string} id */
  isBusy(id) {
    return this._busy.has(id);
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
    const { conversation } = tree;
    const before = { ...conversation.chosen };
    const titleBefore = conversation.title;
    const above = parent === undefined ? tree.path().at(-1)?.id ?? null : parent;
    const replaced = parent === undefined ? undefined : tree.shown(parent);
    const question = this._new(tree, above, "user", { content: text, ...(files.length ? { files } : {}) });
    // A title that was made of a message follows when that message is edited.
    const isMade = !titleBefore || (replaced && above === null && titleBefore === titleOf(replaced.content));
    if (isMade) conversation.title = titleOf(text || files[0]?.name || "");
    await this._answer(tree, question, () => {
      tree.remove(question);
      conversation.title = titleBefore;
      conversation.chosen = before;
      this.keepDraft(conversation.id, text, files);
    });
  }

  /** Give the results of the calls of an answer, and go on. The next call is the model's to decide: a forced one would
   * be made again and again.
   * @param {Message} asked @param {Array<{id: string, text: string}>} results */
  async sendResults(asked, results) {
    const tree = this.tree;
    if (!tree) return;
    let above = asked;
    const added = results.map(({ id, text }) => {
      above = this._new(tree, above.id, "tool", { content: text, toolCallId: id });
      return above;
    });
    if (tree.conversation.toolChoice !== "none") tree.conversation.toolChoice = "auto";
    await this._answer(tree, above, () => added.reverse().forEach((each) => tree.remove(each)));
  }

  /** Make an answer again, as a sibling. @param {Message} answer @param {string} [model] in place of the conversation's */
  async regenerate(answer, model) {
    const tree = this.tree;
    const question = tree?.byId.get(answer.parent ?? "");
    if (tree && question) await this._answer(tree, question, () => tree.choose(answer), model);
  }

  /** The answer to a message that has none. @param {Message} question */
  async answer(question) {
    if (this.tree) await this._answer(this.tree, question, () => {});
  }

  /** @param {Tree} tree @param {Message} question @param {() => void} undo @param {string} [model] */
  async _answer(tree, question, undo, model) {
    const { conversation } = tree;
    if (conversation.session || (recall("newOnServer", false) && !this.all.has(conversation.id))) {
      if (!(await this._isReady(tree, question, undo))) return;
    }
    const path = tree.pathTo(question);
    if (server.models.length > 1) conversation.sampling.model = modelOf(conversation);
    /** @type {Record<string, any>} */
    const body = { ...chatBody(conversation, path, model), ...streaming(conversation.sampling.stream !== false) };
    if (conversation.session) (await sessions()).addTurn(conversation, body, path);
    const { answers } = conversation.sampling;
    const count = NUM_ANSWERS.includes(answers) && !conversation.session ? answers : 1;
    if (count > 1) body.n = count;
    /** @type {Partial<Message>} */
    const fields = { schema: parsed(conversation.schema) ?? null, ...(count > 1 ? { together: newId() } : {}) };
    const messages = Array.from({ length: count }, () => this._new(tree, question.id, "assistant", fields));
    tree.choose(messages[0]);
    await this._run(tree, messages, "/v1/chat/completions", body, { before: path.slice(-2), undo });
  }

  /** Whether the session of a conversation can take what ends with a message. It is busy from here on; its id may
   * change: that of a session comes from the server.
   * @param {Tree} tree @param {Message} last @param {() => void} undo */
  async _isReady(tree, last, undo) {
    const before = tree.conversation.id;
    const isNew = !this.all.has(before);
    this._busy.set(before, tree);
    this.changed();
    try {
      await (await sessions()).prepareSession(tree, last);
      const { conversation } = tree;
      if (isNew) this.all.delete(before); // the list may have been read meanwhile
      this.all.set(conversation.id, conversation);
      this._busy.delete(before);
      this._busy.set(conversation.id, tree);
      if (conversation.id !== before) this._moveDraft(before, conversation.id);
      return true;
    } catch (error) {
      if (isNew) this.all.delete(before);
      this._busy.delete(before);
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
    const isExact = answer.promptIds?.length && ids.length && !answer.reasoning && !answer.toolCalls?.length
      && !conversation.session && (from || !conversation.forgets);
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
    if (!from && answer.finish !== "length") {
      const { settledIds } = await import("./token_text.js");
      ids = await settledIds(model, ids, answer.content);
    }
    if (this.isBusy(conversation.id)) return;
    const message = this._new(tree, answer.parent, "assistant", { content: text, promptIds: prompt, tokenIds: [...ids] });
    const numMade = from || answer.finish === "length" ? 0 : ids.length;
    const body = { ...completionBody(conversation, [...prompt, ...ids], model, numMade), ...streaming(true) };
    await this._run(tree, [message], "/v1/completions", body, { numGiven: ids.length, undo });
  }

  /** Go on where the text of an answer ends. A session has one version of it.
   * @param {Tree} tree @param {Message} answer @param {() => void} undo */
  async _goOnFromText(tree, answer, undo) {
    if (tree.conversation.session && !(await this._isReady(tree, answer, undo))) return;
    const { conversation } = tree;
    const path = tree.pathTo(answer);
    const body = { ...chatBody(conversation, path), ...streaming(true), continue_final_message: true };
    if (conversation.session) (await sessions()).addTurn(conversation, body, path);
    const message = this._new(tree, answer.parent, "assistant", { content: answer.content });
    const begun = conversation.session ? () => tree.remove(tree.byId.get(answer.id) ?? answer) : undefined;
    await this._run(tree, [message], "/v1/chat/completions", body, { undo, begun });
  }

  /** Let the conversation go on without its oldest messages from now on; and an answer, if it broke off.
   * @param {Message} [answer] */
  async forget(answer) {
    const { tree } = this;
    if (!tree) return;
    tree.conversation.forgets = true;
    this.errors.delete(tree.conversation.id);
    await this._write(tree.conversation);
    this.changed();
    if (answer) await this.goOn(answer);
  }

  /** Begin a branch with a summary of the conversation, which is then all that the model reads of it. */
  async summarise() {
    const { tree } = this; // another one may be open when the module is there
    if (tree) await (await import("./summary.js")).summarise(this, tree);
  }

  /** @param {Tree} tree @param {Message[]} messages @param {string} path @param {Record<string, any>} body @param {How} how */
  async _run(tree, messages, path, body, how) {
    const { conversation } = tree;
    const generation = new Generation(messages, path, body, (made) => void this._write(null, made));
    generation.numGiven = how.numGiven ?? 0;
    for (const each of messages) each.finish = "running";
    this.errors.delete(conversation.id);
    const isNew = !this.all.has(conversation.id);
    const written = [...(how.before ?? []), ...messages];
    const keepAll = () => {
      conversation.updated = Date.now();
      this.all.set(conversation.id, conversation);
      void this._write(conversation, written);
    };
    generation.addEventListener("begin", () => {
      how.begun?.();
      keepAll();
      this.changed();
    });
    const refused = (/** @type {unknown} */ error) => {
      messages.forEach((each) => tree.remove(each));
      how.undo();
      if (isNew && !generation.hasBegun) this.all.delete(conversation.id);
      if (!conversation.session) void this._unwrite(conversation, written.filter((each) => !tree.byId.has(each.id)));
      if (error) this._refused(conversation, error);
    };
    await this._make(tree, generation, () => {
      if (!conversation.session) keepAll(); // a page that is left now finds the answer again
      return generation.run();
    }, refused);
  }

  /** @param {Tree} tree @param {Generation} generation @param {() => Promise<void>} work
   * @param {(error: unknown) => void} refused */
  async _make(tree, generation, work, refused) {
    const { conversation } = tree;
    const { messages, message } = generation;
    for (const each of messages) this.running.set(each.id, generation);
    this._busy.set(conversation.id, tree);
    this.changed();
    try {
      if (navigator.locks) await navigator.locks.request(`infer-${message.id}`, work);
      else await work();
      if (!generation.hasBegun) refused(null);
      else void this._readTrace(messages);
      if (conversation.session) (await sessions()).noteKept(tree, message);
    } catch (error) {
      refused(error);
    } finally {
      for (const each of messages) this.running.delete(each.id);
      const isBusy = [...this.running.values()].some((each) => each.message.conversation === conversation.id);
      if (!isBusy) this._busy.delete(conversation.id);
      this.changed();
      this.dispatchEvent(new CustomEvent("ended", { detail: message }));
    }
  }

  /** Go on with an answer that a page before this one has begun. @param {Tree} tree @param {Message} first */
  async resume(tree, first) {
    const group = first.together ? tree.children(first.parent).filter((each) => each.together === first.together) : [first];
    if (group.some((each) => this.running.has(each.id))) return;
    const generation = new Generation(group, "", { model: first.figures?.model }, (made) => void this._write(null, made));
    await this._make(tree, generation, () => generation.resume(), () => {});
  }

  /** Take the time of decoding and the restarts from the server's trace: the browser's clock sees
   * when pieces were read, which is late and all at once while the page is busy.
   * @param {Message[]} messages */
  async _readTrace(messages) {
    const { figures } = messages[0];
    if (!figures?.requestId) return;
    const query = figures.model ? `?model=${encodeURIComponent(figures.model)}` : "";
    const read = () => askJson(`/v1/requests/${encodeURIComponent(figures.requestId)}${query}`).catch(() => null);
    let trace = await read();
    if (trace?.total_ms === null) {
      await new Promise((done) => setTimeout(done, 200));
      trace = await read();
    }
    if (!trace) return;
    this.traces = [...this.traces.slice(1 - MAX_TRACES), [trace, figures.startedAt]];
    for (const message of messages) {
      if (!message.figures) continue;
      if (trace.first_token_ms && trace.total_ms) message.figures.decodeMs = trace.total_ms - trace.first_token_ms;
      if (trace.restarts) message.figures.restarts = trace.restarts;
    }
    await this._write(null, messages);
    this.changed();
  }

  /** @param {Conversation} conversation @param {unknown} error */
  _refused(conversation, error) {
    const known = error instanceof ApiError ? error : new ApiError("failed", String(error));
    this.errors.set(conversation.id, known);
    if (known.kind === "model" || known.kind === "busy" || known.kind === "offline") void server.refresh();
    this.changed();
  }

  stopAll() {
    for (const each of this.running.values()) {
      if (each.message.conversation === this.tree?.conversation.id) each.stop();
    }
  }
}
