/** `chats`: the conversations of this reader, the one that is open, and what is typed in them. */

import { ApiError, askJson, server } from "./api.js";
import { Answering, sessions } from "./answering.js";
import { Tree, newConversation, titleOf } from "./records.js";
import { chatBody } from "./request.js";
import { storage } from "./storage.js";
import { keep, recall } from "./local.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */
/** @typedef {import("./records.js").TextFile} TextFile */

/** @typedef {{text: string, files: TextFile[]}} Draft */

/** How long a conversation that was deleted can be brought back, in milliseconds. */
const UNDO_MS = 20_000;
/** Milliseconds without typing after which a draft is written. */
const DRAFT_MS = 150;
/** Name of the draft of a conversation that has no message yet. */
const NEW = "new";

class Chats extends Answering {
  constructor() {
    super();
    /** What is typed and not sent, by conversation. @type {Map<string, Draft>} */
    this.drafts = new Map();
    /** What was deleted last. @type {{conversation: Conversation, messages: Message[]} | null} */
    this.removed = null;
    /** Answers that another tab makes. @type {Set<string>} */
    this._elsewhere = new Set();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._writing = undefined;
    addEventListener("pagehide", () => this._writeDraft());
    this.isLoaded = false;
    /** When the first conversation is open. @type {Promise<void>} */
    this.opened = new Promise((resolve) => { this._isOpened = resolve; });
    /** Whether another conversation is being opened. */
    this.isOpening = false;
    /** How often a conversation was opened: what is read for an earlier one comes too late. */
    this._numOpened = 0;
    storage.addEventListener("problem", () => this.changed());
    storage.addEventListener("elsewhere", () => void this.refresh());
  }

  get current() {
    return this.tree?.conversation ?? null;
  }

  /** Read the list, and open a conversation or a new one. @param {string} id */
  async load(id) {
    try {
      await this._readList();
      this.isLoaded = true;
      await this.open(id);
    } finally {
      this._isOpened();
    }
  }

  async _readList() {
    const found = await storage.conversations();
    const listed = recall("hasSessions", false) ? await sessions().then((each) => each.listSessions()).catch(() => null) : null;
    const kept = listed ? [] : [...this.all.values()].filter((each) => each.session);
    const own = [...this._busy.values()].map((tree) => tree.conversation);
    const fresh = [...found, ...kept, ...(listed ?? []), ...own];
    this.all.clear();
    for (const each of fresh) this.all.set(each.id, each);
    const now = this.tree?.conversation;
    const known = now && this.all.get(now.id);
    if (now && known && known !== now) this.all.set(now.id, known.session ? now : Object.assign(now, known));
  }

  /** @param {Tree} tree */
  _show(tree) {
    this.tree = tree;
  }

  /** Read the list and the open conversation again: another tab has written, or conversations were imported. */
  async refresh() {
    await this._readList();
    const shown = this.tree;
    const turn = this._numOpened;
    if (shown && !this.isBusy(shown.conversation.id)) {
      if (this.all.has(shown.conversation.id)) {
        const tree = await this._treeOf(shown.conversation).catch(() => shown); // it stays as it was
        if (turn === this._numOpened && this.tree === shown) this._show(tree);
      } else if (shown.byId.size) await this.open("");
    }
    this.changed();
  }

  /** @param {Conversation} conversation */
  async _treeOf(conversation) {
    const busy = this._busy.get(conversation.id);
    if (busy) return busy;
    const messages = conversation.session ? await (await sessions()).readSession(conversation) : await storage.messages(conversation.id);
    const since = this._busy.get(conversation.id); // a message that was sent meanwhile stands only there
    const tree = since ?? new Tree(conversation, messages);
    if (!since) await this._takeUp(tree, messages);
    return tree;
  }

  /** Answers whose tab has gone: this one takes them up, if the server has them. Those of another tab come when it
   * writes, or when it has gone.
   * @param {Tree} tree @param {Message[]} messages */
  async _takeUp(tree, messages) {
    for (const each of messages.filter((message) => message.finish === "running")) {
      const lock = `infer-${each.resume?.name.replace(/^page-/, "") ?? each.id}`;
      const isElsewhere = navigator.locks
        ? await navigator.locks.request(lock, { ifAvailable: true }, (found) => found === null)
        : Date.now() - (each.figures?.startedAt ?? 0) < 5000;
      if (!isElsewhere && each.resume && `page-${each.id}` === each.resume.name) void this.resume(tree, each);
      else if (!isElsewhere && !each.resume) each.finish = "lost";
      else if (isElsewhere && !this._elsewhere.has(lock)) {
        this._elsewhere.add(lock);
        void navigator.locks?.request(lock, () => { this._elsewhere.delete(lock); }).then(() => this.refresh());
      }
    }
  }

  /** The draft of the open conversation, which may be changed; `keepDraft` keeps it. @returns {Draft} */
  get draft() {
    const id = this.current?.id ?? "";
    let draft = this.drafts.get(id);
    if (!draft) this.drafts.set(id, (draft = { text: "", files: [] }));
    return draft;
  }

  /** Keep what is typed and not sent. @param {string} id @param {string} text @param {TextFile[]} files */
  keepDraft(id, text, files) {
    this.drafts.set(id, { text, files });
    clearTimeout(this._writing);
    this._writing = setTimeout(() => this._writeDraft(), DRAFT_MS);
  }

  _writeDraft() {
    clearTimeout(this._writing);
    for (const [id, draft] of this.drafts) void storage.writeDraft(this.all.has(id) ? id : NEW, draft.text || draft.files.length ? draft : null);
    if (storage.problem) return; // then they are here or nowhere
    for (const id of this.drafts.keys()) if (id !== this.current?.id) this.drafts.delete(id);
  }

  /** The draft is sent. @param {string} id */
  dropDraft(id) {
    this.drafts.delete(id);
    clearTimeout(this._writing);
    void storage.writeDraft(this.all.has(id) ? id : NEW, null);
  }

  /** @param {string} before @param {string} after */
  _moveDraft(before, after) {
    const draft = this.drafts.get(before);
    this.dropDraft(before);
    if (draft?.text || draft?.files.length) this.keepDraft(after, draft.text, draft.files);
  }

  async _readDraft() {
    const id = this.current?.id ?? "";
    const found = await storage.draft(this.all.has(id) ? id : NEW);
    const { text, files } = this.drafts.get(id) ?? { text: "", files: [] };
    if (!found || text || files.length || this.current?.id !== id) return;
    this.drafts.set(id, found);
    this.changed();
  }

  /** Open a conversation; "" or an unknown id opens a new one. @param {string} id */
  async open(id) {
    const known = this.all.get(id);
    const turn = (this._numOpened += 1);
    this.isOpening = Boolean(known);
    if (known) {
      let tree = new Tree(known, []);
      try {
        tree = await this._treeOf(known);
      } catch (error) {
        this._refused(known, error);
      }
      if (turn !== this._numOpened) return;
      this.isOpening = false;
      this._show(tree);
    } else if (!this.current || this.all.has(this.current.id)) {
      const last = recall("defaults", /** @type {Record<string, any>} */ ({}));
      const system = recall("system", "");
      this._show(new Tree(newConversation({ sampling: { ...last }, system }), []));
    }
    this._adoptDraft();
    this.changed();
    await this._readDraft();
  }

  /** What was typed before there was a conversation belongs to the first one. */
  _adoptDraft() {
    const early = this.drafts.get("");
    if (!early || !this.current) return;
    this.drafts.delete("");
    if (early.text || early.files.length) this.keepDraft(this.current.id, early.text, early.files);
  }

  /** Let a model answer in the open conversation, and in new ones. @param {string} model */
  async setModel(model) {
    server.choose(model);
    if (this.current) this.current.sampling.model = model;
    await this.keepSettings();
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

  /** @param {Conversation} conversation @param {Message[]} messages */
  async _unwrite(conversation, messages) {
    if (!this.all.has(conversation.id)) await storage.removeConversation(conversation.id);
    else {
      await storage.removeMessages(conversation.id, messages.map((each) => each.id));
      await this._write(conversation);
    }
  }

  /** @param {Conversation} conversation @param {string} title */
  async rename(conversation, title) {
    const before = conversation.title;
    conversation.title = titleOf(title) || before;
    this.changed();
    try {
      if (conversation.session) await (await sessions()).renameSession(conversation);
      await this._write(conversation);
    } catch (error) {
      conversation.title = before;
      this._refused(this.current ?? conversation, error);
    }
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

  /** Whether the conversation is gone: the server may not have deleted it. @param {Conversation} conversation */
  async remove(conversation) {
    for (const each of this.running.values()) {
      if (each.message.conversation === conversation.id) each.stop();
    }
    this.all.delete(conversation.id);
    this.changed();
    if (conversation.session) {
      try {
        await (await sessions()).removeSession(conversation);
      } catch (error) {
        if (!(error instanceof ApiError && error.status === 404)) {
          this.all.set(conversation.id, conversation);
          this._refused(this.current ?? conversation, error);
          return false;
        }
      }
    } else {
      const removed = { conversation, messages: await storage.messages(conversation.id) };
      await storage.removeConversation(conversation.id);
      this.removed = removed;
      setTimeout(() => {
        if (this.removed === removed) this.removed = null;
        this.changed();
      }, UNDO_MS);
    }
    if (this.current?.id === conversation.id) {
      this.tree = null; // else it would be taken for a new one, which has no record yet
      await this.open("");
    }
    this.changed();
    return true;
  }

  /** Bring back what was deleted last. */
  async undo() {
    const { removed } = this;
    this.removed = null;
    if (removed) {
      this.all.set(removed.conversation.id, removed.conversation);
      const messages = removed.messages.map(({ resume: _, ...each }) => ({ ...each, ...(each.finish === "running" ? { finish: "stopped" } : {}) }));
      await storage.write(removed.conversation, messages);
      await this.open(removed.conversation.id);
    }
    this.changed();
    return removed?.conversation ?? null;
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
    const { tree } = this;
    if (!tree) return;
    tree.choose(message);
    const group = message.together ? tree.children(message.parent).filter((each) => each.together === message.together) : [];
    for (const each of group) delete each.together;
    await this._write(tree.conversation, group);
    this.changed();
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
