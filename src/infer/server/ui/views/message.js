/** `<chat-message>`: one message with what can be done with it. */

import { html, live, nothing } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { glyphs } from "../lib/glyphs.js";
import { server } from "../lib/api.js";
import { duration, number, rate, size, t } from "../lib/i18n.js";
import { plainLine, speedOf } from "../lib/records.js";
import { modelOf, roomOf } from "../lib/request.js";
import { copyText } from "../lib/text_view.js";
import { speech } from "../lib/speech.js";

/** Lines of one's own text that are surely in sight (message.css: 24rem), and characters of the narrowest line. */
const LINES_IN_SIGHT = 14, CHARACTERS_A_LINE = 30;

/** @typedef {import("../lib/records.js").Message} Message */

class ChatMessage extends PageElement {
  static properties = { message: { attribute: false }, editing: { state: true }, panel: { state: true }, verdict: { state: true }, choosing: { state: true } };

  constructor() {
    super();
    /** @type {Message | undefined} */
    this.message = undefined;
    this.editing = false;
    this._edited = "";
    /** Whether the other models are shown. */
    this.choosing = false;
    /** What is open below the answer: "", "happened" or "tokens". */
    this.panel = "";
    /** Whether the answer fits its schema: null = not known. @type {{fits: boolean, why: string} | null} */
    this.verdict = null;
    /** @type {import("../lib/generation.js").Generation | null} */
    this._generation = null;
    /** Why nothing comes, as it is shown. @type {import("../lib/generation.js").Status | null} */
    this._status = null;
    this._frame = 0;
    this._piece = () => {
      this._frame ||= requestAnimationFrame(() => {
        this._frame = 0;
        this._grow();
      });
    };
    this.hears(chats, "change");
    this.hears(server, "change");
  }

  connectedCallback() {
    super.connectedCallback();
    this._listen();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._generation?.removeEventListener("piece", this._piece);
    this._generation = null;
  }

  _listen() {
    const now = chats.running.get(this.message?.id ?? "") ?? null;
    if (now === this._generation) return;
    this._generation?.removeEventListener("piece", this._piece);
    this._generation = now;
    now?.addEventListener("piece", this._piece);
  }

  /** New text: only the text views are told, nothing else is rendered again. */
  _grow() {
    const { message } = this;
    if (!message || message.finish !== "running") return;
    const text = this._text("content");
    const status = this._generation?.status ?? null;
    if (!text || (this.querySelector(".waiting") && message.content) || status !== this._status || message.toolCalls?.length || (message.reasoning && !this.querySelector(".reasoning"))) {
      this.requestUpdate();
      return;
    }
    text.value = { text: message.content, isOpen: true };
    const thoughts = this._text("reasoning");
    if (thoughts) thoughts.value = { text: message.reasoning ?? "", isOpen: !message.content };
    const count = this.querySelector(".count");
    if (count) count.textContent = t("happened.tokens", { n: message.figures?.completionTokens ?? 0 });
  }

  /** @param {string} part @returns {any} */
  _text(part) {
    return this.querySelector(`text-view[data-part="${part}"]`);
  }

  updated() {
    this._listen();
    const { message } = this;
    if (!message) return;
    if (message.toolCalls?.length) import("./tools.js").catch(() => {});
    const isOpen = message.finish === "running";
    const text = this._text("content");
    if (text) text.value = { text: message.content, isOpen };
    const thoughts = this._text("reasoning");
    if (thoughts) thoughts.value = { text: message.reasoning ?? "", isOpen };
    if (message.schema && !isOpen && !this.verdict) void this._check();
  }

  async _check() {
    const { check } = await import("../lib/schema.js");
    this.verdict = check(/** @type {object} */ (this.message?.schema), this.message?.content ?? "");
  }

  render() {
    const { message } = this;
    if (!message) return nothing;
    const isOwn = message.role === "user";
    return html`<article class="message ${message.role}" aria-label=${t(`role.${message.role}`)} aria-busy=${message.finish === "running"}>
      ${message.role === "tool" ? html`<p class="quiet small">${t("tool.result")}</p>` : nothing}
      ${this._files()}
      ${this.editing ? this._editor() : isOwn || message.role === "tool"
        ? this._ownText(message) : this._answer(message)}
      ${this.editing ? nothing : this._acts(message)}
      ${this._panel(message)}
    </article>`;
  }

  /** What was sent. Text that may be cut at its greatest height scrolls, so it takes the focus of the keyboard.
   * @param {Message} message */
  _ownText(message) {
    const isLong = message.content.length / CHARACTERS_A_LINE + message.content.split("\n").length > LINES_IN_SIGHT;
    return html`<div class="own-text" dir="auto" tabindex=${isLong ? 0 : nothing} role=${isLong ? "group" : nothing}
      aria-label=${isLong ? t(`role.${message.role}`) : nothing}>${message.content}</div>`;
  }

  /** @param {Message} message */
  _answer(message) {
    const isRunning = message.finish === "running";
    this._status = isRunning ? this._generation?.status ?? null : null;
    return html`
      ${this._model(message)}
      ${message.reasoning ? html`<details class="reasoning" ?open=${isRunning && !message.content}>
        <summary>${t(isRunning && !message.content ? "reasoning.now" : "reasoning.label")}</summary>
        <text-view data-part="reasoning"></text-view></details>` : nothing}
      <text-view class="prose ${isRunning ? "growing" : ""}" data-part="content"></text-view>
      ${isRunning && !message.content && !message.reasoning ? html`<p class="waiting quiet">${this._status ? nothing : html`<span class="unseen">${t("chat.waiting")}</span>`}</p>` : nothing}
      ${this._status ? html`<p class="silence quiet small" role="status">${silence(this._status)}</p>` : nothing}
      ${message.toolCalls?.length ? html`<tool-calls .message=${message}></tool-calls>` : nothing}
      ${this._ending(message)}
    `;
  }

  /** What is to be said about how an answer ended. @param {Message} message */
  _ending(message) {
    const texts = /** @type {Record<string, string>} */ ({ lost: "end.lost", error: "end.error", length: "end.length", stopped: "end.stopped" });
    const key = texts[message.finish ?? ""];
    const said = !key ? nothing : this._isFull(message) ? html`<p class="ending full small">${t("end.full", { limit: this._limit(message) })}
      <button class="plain" @click=${() => chats.forget(message)}>${t("act.forget")}</button>
      <button class="plain" @click=${() => chats.summarise()}>${t("act.summarise")}</button></p>` : html`<p class="ending ${message.finish === "lost" || message.finish === "error" ? "bad" : "quiet"} small">
      ${t(key, { problem: plainLine(message.problem ?? "") })}
      <button class="plain" @click=${() => chats.goOn(message)}>${t("act.continue")}</button></p>`;
    const verdict = !this.verdict ? nothing : html`<p class="small ${this.verdict.fits ? "fits" : "bad"}">
      ${this.verdict.fits ? t("schema.fits") : t("schema.differs", { why: this.verdict.why })}</p>`;
    return html`${said}${verdict}`;
  }

  /** @param {Message} message */
  _limit({ figures }) {
    return roomOf(figures?.model) ?? 0;
  }

  /** Whether an answer ended because the context was full. @param {Message} message */
  _isFull(message) {
    const { finish, figures } = message;
    const limit = this._limit(message);
    return finish === "length" && limit > 0 && (figures?.promptTokens ?? 0) + (figures?.completionTokens ?? 0) >= limit;
  }

  /** The model that answered, where there are several. @param {Message} message */
  _model({ figures }) {
    if (server.models.length < 2 || !figures?.model) return nothing;
    return html`<p class="quiet small by" dir="auto">${plainLine(figures.model)}</p>`;
  }

  _files() {
    const files = this.message?.files ?? [];
    if (!files.length) return nothing;
    return html`<ul class="files">${files.map((file) => html`<li><details class="chip">
      <summary><span dir="auto">${plainLine(file.name)}</span> <span class="quiet">${size(file.size)}</span></summary>
      <pre tabindex="0">${file.text.slice(0, 20000)}</pre></details></li>`)}</ul>`;
  }

  edit() {
    if (!this.message || chats.isBusy(this.message.conversation)) return;
    this._edited = this.message.content;
    this.editing = true;
    void this.updateComplete.then(() => {
      const field = /** @type {HTMLTextAreaElement | null} */ (this.querySelector("textarea"));
      field?.focus();
      field?.setSelectionRange(field.value.length, field.value.length);
    });
  }

  _editor() {
    const stop = () => {
      this.editing = false;
      void this.updateComplete.then(() => /** @type {HTMLElement | null} */ (this.querySelector("button.edit"))?.focus());
    };
    const send = () => {
      const { message } = this;
      this.editing = false;
      if (!message) return;
      if (message.role === "user") void chats.send(this._edited, message.files ?? [], message.parent);
      else void chats.replace(message, this._edited);
    };
    return html`<textarea class="editor" dir="auto" rows=${Math.min(12, this._edited.split("\n").length + 1)} aria-label=${t("edit.label")} .value=${live(this._edited)}
        @input=${(/** @type {Event} */ event) => { this._edited = /** @type {HTMLTextAreaElement} */ (event.target).value; }}
        @keydown=${(/** @type {KeyboardEvent} */ event) => {
          if (event.isComposing || event.keyCode === 229) return;
          if (event.key === "Enter" && !event.shiftKey) send();
          else if (event.key === "Escape") stop();
          else return;
          event.preventDefault();
          event.stopPropagation();
        }}></textarea>
      <div class="row"><button class="main" @click=${send}>${t(this.message?.role === "user" ? "act.send" : "act.save")}</button><button class="plain" @click=${stop}>${t("act.cancel")}</button></div>`;
  }

  /** @param {Message} message */
  _acts(message) {
    const isBusy = chats.isBusy(message.conversation);
    const isAnswer = message.role === "assistant";
    const isRunning = message.finish === "running";
    const figures = message.figures;
    return html`<div class="acts row">
      ${this._siblings(message)}
      ${isRunning ? html`<span class="quiet small count"></span>` : html`
        <button class="icon" aria-label=${t("act.copy-message")} title=${t("act.copy-message")} @click=${() => this._copy(message)}>${glyphs.copy()}</button>
        <button class="icon edit" aria-label=${t("act.edit")} title=${t("act.edit")} ?disabled=${isBusy} @click=${() => this.edit()}>${glyphs.edit()}</button>
        ${isAnswer ? html`<button class="icon again" aria-label=${t("act.regenerate")} title=${t("act.regenerate")} ?disabled=${isBusy} @click=${() => chats.regenerate(message)}>${glyphs.again()}</button>${this._others(message, isBusy)}` : nothing}
        ${isAnswer && message.tokenIds?.length ? html`<button class="toggle small" aria-expanded=${this.panel === "tokens"} @click=${() => this._toggle("tokens")}>${t("tokens.button")}</button>` : nothing}
        ${isAnswer && figures?.requestId ? html`<button class="toggle small figures" aria-expanded=${this.panel === "happened"} @click=${() => this._toggle("happened")}>${this._figures(message)}</button>` : nothing}`}
    </div>`;
  }

  /** Other models that can answer again. @param {Message} message @param {boolean} isBusy */
  _others(message, isBusy) {
    if (server.models.length < 2 || !chats.current) return nothing;
    const now = message.figures?.model ?? modelOf(chats.current);
    /** @param {string} model */
    const ask = (model) => {
      this.choosing = false;
      void chats.regenerate(message, model);
    };
    return html`<button class="small again-with" aria-expanded=${this.choosing} ?disabled=${isBusy} @click=${() => { this.choosing = !this.choosing; }}>${t("act.again-with")}</button>
      ${this.choosing ? html`<span class="row again-models" role="group" aria-label=${t("act.again-with")}>${server.models.filter((each) => each.id !== now).map((each) => {
        const why = each.status === "failed" ? `${t("model.failed")}: ${plainLine(each.reason ?? "").slice(0, 80)}` : "";
        return html`<button class="plain small" ?disabled=${isBusy || Boolean(why)} @click=${() => ask(each.id)}>${[each.id, why].filter(Boolean).join(" · ")}</button>`;
      })}</span>` : nothing}`;
  }

  /** The figures of an answer in one line. @param {Message} message */
  _figures(message) {
    const figures = /** @type {NonNullable<Message["figures"]>} */ (message.figures);
    const { completionTokens, firstMs, cachedTokens, promptTokens } = figures;
    const speed = speedOf(figures);
    const parts = [t("happened.tokens", { n: completionTokens })];
    if (speed !== null) parts.push(t("happened.rate", { rate: rate(speed) }));
    if (firstMs !== null) parts.push(t("happened.first", { time: duration(firstMs) }));
    if (cachedTokens) parts.push(t("happened.cached", { n: cachedTokens, of: number(promptTokens) }));
    if (figures.restarts) parts.push(t("happened.restarts", { n: figures.restarts }));
    return parts.join(" · ");
  }

  /** @param {Message} message */
  async _copy(message) {
    speech.say(t((await copyText(message.content)) ? "act.copied" : "act.not-copied"));
  }

  /** @param {string} panel */
  async _toggle(panel) {
    if (this.panel === panel) {
      this.panel = "";
      return;
    }
    await (panel === "tokens" ? import("./tokens.js") : import("./happened.js"));
    this.panel = panel;
    this.dispatchEvent(new Event("reading", { bubbles: true }));
  }

  /** @param {Message} message */
  _panel(message) {
    if (this.panel === "tokens") return html`<token-view .message=${message}></token-view>`;
    if (this.panel === "happened") return html`<what-happened .message=${message}></what-happened>`;
    return nothing;
  }

  /** @param {Message} message */
  _siblings(message) {
    const siblings = chats.tree?.children(message.parent) ?? [];
    if (siblings.length < 2) return nothing;
    const at = siblings.indexOf(message);
    /** @param {number} to @param {string} key @param {() => unknown} shape */
    const step = (to, key, shape) => html`<button class="icon" aria-label=${t(key)} ?disabled=${!siblings[to]} @click=${() => chats.choose(siblings[to])}>${shape()}</button>`;
    return html`<span class="siblings" role="group" aria-label=${t("branch.label")}>
      ${step(at - 1, "branch.before", glyphs.left)}
      <span class="small">${number(at + 1)}/${number(siblings.length)}</span>
      ${step(at + 1, "branch.after", glyphs.right)}</span>`;
  }
}

/** Why a stream is silent, in words. @param {import("../lib/generation.js").Status} status */
function silence({ state, queued_behind: before, prompt_tokens_done: done, prompt_tokens: all }) {
  switch (state) {
    case "queued":
      return t("silence.queued", { n: before });
    case "reading":
      return t("silence.reading", { done, all });
    case "restarting":
    case "preempted":
    case "lost":
      return t(`silence.${state}`);
    default:
      return t("silence.answering");
  }
}

customElements.define("chat-message", ChatMessage);
