/** `<side-bar>`: the conversations with search, and the other views. */

import { html, nothing, repeat } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { glyphs } from "../lib/glyphs.js";
import { t } from "../lib/i18n.js";
import { plainLine } from "../lib/records.js";
import { storage } from "../lib/storage.js";
import { VIEWS, go, place } from "../routes.js";

/** @typedef {import("../lib/records.js").Conversation} Conversation */

const DAY_MS = 86_400_000;
/** Most conversations that are shown at once; a search finds the others. */
const MAX_SHOWN = 400;

/** Milliseconds without typing after which messages are searched, too. */
const SEARCH_MS = 200;

/** @param {string} query */
function wordsOf(query) {
  return query.toLowerCase().split(/\s+/).filter(Boolean);
}

class SideBar extends PageElement {
  static properties = { query: { state: true }, inTexts: { state: true }, renaming: { state: true }, removing: { state: true } };

  constructor() {
    super();
    this.query = "";
    /** Id of the conversation whose title is being edited. */
    this.renaming = "";
    /** Id of the conversation that is to be deleted, until that is confirmed. */
    this.removing = "";
    /** Ids of conversations whose messages have the words that are searched. @type {Set<string>} */
    this.inTexts = new Set();
    this._searching = new AbortController();
    this.hears(chats, "change");
    addEventListener("hashchange", () => this.requestUpdate());
  }

  connectedCallback() {
    super.connectedCallback();
    this.setAttribute("role", "navigation");
  }

  render() {
    const { view } = place();
    this.setAttribute("aria-label", t("side.label"));
    return html`
      <div class="row">
        <span class="brand grow">infer</span>
        <button class="icon" aria-label=${t("chat.new")} title=${t("chat.new")} @click=${() => this._say("new")}>${glyphs.plus()}</button>
      </div>
      <input class="search" type="search" aria-label=${t("side.search")} placeholder=${t("side.search")}
        .value=${this.query} @input=${this._typed}>
      ${chats.removed ? html`<p class="removed small" role="status"><span class="grow clip" dir="auto">${t("side.removed", { title: plainLine(chats.removed.conversation.title) || t("chat.untitled") })}</span>
        <button class="plain undo" @click=${this._undo}>${t("act.undo")}</button></p>` : nothing}
      <div class="conversations">${this._groups()}</div>
      <footer>
        <ul class="views">
          ${VIEWS.map((each) => html`<li><a href=${this._address(each.name)} aria-current=${each === view ? "page" : nothing}
            @click=${() => this._say("close")}>${t(each.title)}</a></li>`)}
        </ul>
        <button @click=${() => this._ask("help")}>${glyphs.help()} ${t("help.title")}</button>
      </footer>
    `;
  }

  /** @param {Event} event */
  _typed(event) {
    this.query = /** @type {HTMLInputElement} */ (event.target).value;
    this._searching.abort();
    this._searching = new AbortController();
    this.inTexts = new Set();
    const { signal } = this._searching;
    if (this.query.trim().length < 3) return;
    setTimeout(() => void (async () => {
      if (signal.aborted) return;
      const found = await storage.matching(wordsOf(this.query), signal);
      if (!signal.aborted) this.inTexts = found;
    })(), SEARCH_MS);
  }

  /** The address of a view; that of the chat is the open conversation's. @param {string} name */
  _address(name) {
    const now = chats.current;
    return name === "chat" && now && chats.all.has(now.id) ? `#/chat/${encodeURIComponent(now.id)}` : `#/${name}`;
  }

  /** @param {string} name */
  _say(name) {
    this.dispatchEvent(new CustomEvent(name));
  }

  /** @param {string} dialog */
  _ask(dialog) {
    this.dispatchEvent(new CustomEvent("ask", { detail: dialog, bubbles: true }));
  }

  _groups() {
    const words = wordsOf(this.query);
    const found = [...chats.all.values()]
      .filter((each) => this.inTexts.has(each.id) || words.every((word) => each.title.toLowerCase().includes(word)))
      .sort((a, b) => b.updated - a.updated);
    const midnight = new Date().setHours(0, 0, 0, 0);
    /** @type {Array<[string, Conversation[]]>} */
    const groups = [
      ["side.pinned", found.filter((each) => each.pinned)],
      ["side.today", found.filter((each) => !each.pinned && each.updated >= midnight)],
      ["side.week", found.filter((each) => !each.pinned && each.updated < midnight && each.updated >= midnight - 6 * DAY_MS)],
      ["side.older", found.filter((each) => !each.pinned && each.updated < midnight - 6 * DAY_MS)],
    ];
    if (!found.length) return html`<p class="quiet small">${t(words.length ? "side.none-found" : "side.none")}</p>`;
    let left = MAX_SHOWN;
    return groups.filter(([, list]) => list.length).map(([title, list]) => {
      const shown = list.slice(0, Math.max(0, left));
      left -= shown.length;
      return html`<h2>${t(title)}</h2>
        <ul>${repeat(shown, (each) => each.id, (each) => this._row(each))}</ul>`;
    });
  }

  /** @param {Conversation} each */
  _row(each) {
    const isCurrent = place().view.name === "chat" && chats.current?.id === each.id;
    if (this.renaming === each.id) return html`<li>${this._field(each)}</li>`;
    if (this.removing === each.id) return html`<li>${this._question(each)}</li>`;
    const title = plainLine(each.title) || t("chat.untitled");
    return html`<li class=${isCurrent ? "current" : ""}>
      <button class="open" aria-current=${isCurrent ? "true" : nothing} title=${title}
        @click=${() => { go("chat", each.id); this._say("close"); }}
        @keydown=${(/** @type {KeyboardEvent} */ event) => this._rowKey(event, each)}>
        ${chats.isBusy(each.id) ? html`<span class="busy-dot" role="img" aria-label=${t("chat.answering")}></span>` : nothing}
        ${each.session ? html`<span class="quiet" title=${t("side.on-server")}>☁<span class="unseen">${t("side.on-server")}</span></span>` : nothing}
        ${each.pinned ? html`<span class="pinned" role="img" aria-label=${t("side.pinned")}>${glyphs.pin()}</span>` : nothing}
        <span class="clip" dir="auto">${title}</span>
      </button>
      <span class="acts">
        <button class="icon" aria-pressed=${each.pinned} aria-label=${t("side.pin", { title })} title=${t("act.pin")} @click=${() => chats.pin(each)}>${glyphs.pin()}</button>
        <button class="icon" aria-label=${t("side.rename", { title })} title=${t("act.rename")} @click=${() => this._rename(each)}>${glyphs.edit()}</button>
        <button class="icon" aria-label=${t("side.remove", { title })} title=${t("act.delete")} @click=${() => this._remove(each)}>${glyphs.trash()}</button>
      </span>
    </li>`;
  }

  /** @param {KeyboardEvent} event @param {Conversation} each */
  _rowKey(event, each) {
    if (event.key === "F2") void this._rename(each);
    else if (event.key === "Delete") void this._remove(each);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const rows = /** @type {HTMLElement[]} */ ([...this.querySelectorAll("button.open")]);
      const at = rows.indexOf(/** @type {HTMLElement} */ (event.currentTarget));
      rows[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
    } else return;
    event.preventDefault();
  }

  /** @param {Conversation} each */
  async _rename(each) {
    this.renaming = each.id;
    await this.updateComplete;
    const field = /** @type {HTMLInputElement | null} */ (this.querySelector("input.rename"));
    field?.focus();
    field?.select();
  }

  /** Delete a conversation: one of this browser can be brought back, one of the server is asked about first.
   * @param {Conversation} each */
  async _remove(each) {
    if (!each.session) {
      await this._removed(each);
      return;
    }
    this.removing = each.id;
    await this.updateComplete;
    /** @type {HTMLElement | null} */ (this.querySelector("button.sure"))?.focus();
  }

  /** @param {Conversation} each */
  _field(each) {
    /** @param {Event} event */
    const done = (event) => {
      if (this.renaming !== each.id) return;
      this.renaming = "";
      void chats.rename(each, /** @type {HTMLInputElement} */ (event.target).value);
    };
    return html`<input class="rename" aria-label=${t("side.title")} .value=${each.title} maxlength="200" @blur=${done}
      @keydown=${(/** @type {KeyboardEvent} */ event) => {
        if (event.isComposing) return;
        if (event.key === "Enter") done(event);
        if (event.key === "Escape") { this.renaming = ""; event.stopPropagation(); }
      }}>`;
  }

  /** @param {Conversation} each */
  _question(each) {
    const no = () => { this.removing = ""; };
    return html`<span class="grow small clip">${t("side.sure")}</span>
      <button class="danger sure" @click=${() => { no(); void this._removed(each); }}>${t("act.delete")}</button>
      <button @click=${no}>${t("act.keep")}</button>`;
  }

  /** @param {Conversation} each */
  async _removed(each) {
    const wasOpen = chats.current?.id === each.id;
    const isGone = await chats.remove(each);
    if (wasOpen && isGone) go("chat");
    await this.updateComplete;
    /** @type {HTMLElement | null} */ (this.querySelector(".undo") ?? this.querySelector(".search"))?.focus();
  }

  async _undo() {
    const back = await chats.undo();
    if (back) go("chat", back.id);
    /** @type {HTMLElement | null} */ (this.querySelector(".search"))?.focus();
  }
}

customElements.define("side-bar", SideBar);
