/** `<infer-app>`: the frame of the page: side bar, top bar, a view, dialogs, and the keys. */

import { html, live, nothing } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { glyphs } from "../lib/glyphs.js";
import { language, t } from "../lib/i18n.js";
import { recall } from "../lib/local.js";
import { modelOf } from "../lib/request.js";
import { go, place } from "../routes.js";
import { speech } from "../lib/speech.js";
import "./sidebar.js";
import "./chat.js";

class InferApp extends PageElement {
  static properties = { drawer: { state: true }, dialog: { state: true } };

  constructor() {
    super();
    this.drawer = false;
    /** The dialog that is open: "", "settings", "key" or "help". */
    this.dialog = "";
    /** Views whose module is there. @type {Set<string>} */
    this._loaded = new Set(["chat"]);
    /** The element of the view that was shown last. @type {HTMLElement | null} */
    this._shown = null;
    this.hears(server, "change");
    this.hears(chats, "change");
    /** Id of the open conversation while it is answered. */
    this._busy = "";
    this.hears(speech, "change");
    addEventListener("hashchange", () => void this._moved());
    addEventListener("keydown", (event) => this._key(event));
    this.addEventListener("ask", (event) => this._open(/** @type {CustomEvent<string>} */ (event).detail));
    chats.addEventListener("change", () => this._track());
    chats.addEventListener("ended", (event) => this._ended(/** @type {CustomEvent} */ (event).detail));
    const theme = recall("theme", "");
    if (theme) document.documentElement.dataset.theme = theme;
  }

  connectedCallback() {
    super.connectedCallback();
    this.classList.add("app");
    const { view, id } = place();
    void chats.load(view.name === "chat" ? id : "").then(() => {
      // A phone would show its keyboard.
      if (view.name === "chat" && document.activeElement === document.body && matchMedia("(pointer: fine)").matches) this._focusField();
    });
    void this._moved(true);
  }

  async _moved(isFirst = false) {
    const { view, id } = place();
    this.drawer = false;
    if (!this._loaded.has(view.name)) {
      await view.load();
      this._loaded.add(view.name);
    }
    this.requestUpdate();
    if (!isFirst && view.name === "chat") await chats.open(id);
  }

  /** Say that an answer begins, and let the address name the conversation. */
  _track() {
    const now = chats.current;
    if (!now) return;
    const busy = chats.isBusy(now.id) ? now.id : "";
    if (busy && busy !== this._busy) speech.say(t("said.answering"));
    this._busy = busy;
    const { view, id } = place();
    if (view.name === "chat" && chats.all.has(now.id) && id !== now.id && !chats.isOpening) {
      history.replaceState(null, "", `#/chat/${encodeURIComponent(now.id)}`);
    }
  }

  /** @param {import("../lib/records.js").Message} message */
  _ended(message) {
    if (message.conversation !== chats.current?.id || !message.finish) return;
    const endings = ["stopped", "lost", "error"];
    speech.say(t(endings.includes(message.finish) ? `said.${message.finish}` : "said.done"));
  }

  /** Open a dialog; its module is loaded when it is first needed. @param {string} name */
  async _open(name) {
    const modules = /** @type {Record<string, () => Promise<unknown>>} */ ({
      settings: () => import("./settings.js"), key: () => import("./key.js"), help: () => import("./help.js"),
    });
    if (modules[name]) await modules[name]();
    this.dialog = name;
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    if (event.isComposing || event.defaultPrevented) return;
    const command = event.ctrlKey || event.metaKey;
    const field = /** @type {HTMLElement} */ (event.target);
    const isTyping = field.matches?.("input, textarea, select, [contenteditable]");
    if (command && !event.shiftKey && event.key.toLowerCase() === "k") {
      this.drawer = true;
      void this.updateComplete.then(() => /** @type {HTMLElement | null} */ (this.querySelector(".sidebar .search"))?.focus());
    } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
      this._new();
    } else if (event.key === "?" && !isTyping && !command && !this.dialog) {
      void this._open("help");
    } else if (event.key === "/" && !isTyping && !command && !this.dialog && place().view.name === "chat") {
      this._focusField();
    } else if (event.key === "Escape" && !this.dialog) {
      const isBusy = chats.current && chats.isBusy(chats.current.id);
      if (!this.drawer && !isBusy) return;
      // The list is only in the way in a narrow window; what was asked for last must not keep an answer going.
      this.drawer = false;
      if (isBusy) chats.stopAll();
      if (place().view.name === "chat") this._focusField();
    } else return;
    event.preventDefault();
  }

  _focusField() {
    /** @type {HTMLElement | null} */ (this.querySelector(".composer textarea"))?.focus({ preventScroll: true });
  }

  _new() {
    this.drawer = false;
    go("chat");
    void chats.open("").then(() => this._focusField());
  }

  render() {
    const { view } = place();
    this.classList.toggle("drawer", this.drawer);
    document.title = view.name === "chat" && chats.current?.title ? `${chats.current.title} · infer` : "infer";
    return html`
      <a class="unseen" href="#view" @click=${this._skip}>${t("act.skip")}</a>
      <side-bar class="sidebar" @new=${this._new} @close=${() => { this.drawer = false; }}></side-bar>
      <button class="scrim" tabindex="-1" aria-label=${t("act.close-menu")} @click=${() => { this.drawer = false; }}></button>
      <div class="stage">
        <header class="topbar">
          <button class="icon menu-button" aria-label=${t("act.menu")} aria-expanded=${this.drawer}
            @click=${() => { this.drawer = true; }}>${glyphs.menu()}</button>
          <h1 class="clip">${this._models()}</h1>
          <span class="grow clip small quiet title" dir="auto">${view.name === "chat" ? chats.current?.title || t("chat.new") : t(view.title)}</span>
          <button class="icon" aria-label=${t("act.settings")} title=${t("act.settings")}
            @click=${() => this._open("settings")}>${glyphs.tune()}</button>
        </header>
        ${this._view(view.name)}
      </div>
      <div class="unseen" role="status" aria-live="polite">${speech.text}</div>
      ${this._dialog()}
    `;
  }

  /** @param {string} name */
  _view(name) {
    if (name === "chat") return html`<chat-view class="view-frame"></chat-view>`;
    if (!this._loaded.has(name)) return html`<main class="view" id="view"></main>`;
    return html`<main class="view" id="view" tabindex="-1">${this._element(name)}</main>`;
  }

  /** The element of a view that has a module of its own. @param {string} name */
  _element(name) {
    const { tag } = place().view;
    if (this._shown?.localName !== tag) this._shown = document.createElement(tag);
    return name ? this._shown : nothing;
  }

  /** @param {Event} event */
  _skip(event) {
    event.preventDefault();
    /** @type {HTMLElement | null} */ (this.querySelector("#view"))?.focus();
  }

  _models() {
    const { models, error } = server;
    if (error?.kind === "key") {
      return html`<button class="main" @click=${() => this._open("key")}>${t("key.enter")}</button>`;
    }
    if (error) return html`<span class="bad small">${t("server.away")}</span>`;
    if (!models.length) return html`<span class="quiet small">…</span>`;
    /** @param {{id: string, status?: string, reason?: string | null}} each */
    const label = (each) => (each.status && each.status !== "loaded" ? `${each.id} · ${t(`model.${each.status}`)}` : each.id);
    const chosen = chats.current ? modelOf(chats.current) : server.current?.id;
    if (models.length === 1) return html`<span title=${models[0].reason ?? nothing}>${label(models[0])}</span>`;
    return html`<select aria-label=${t("model.choose")} title=${models.find((each) => each.id === chosen)?.reason ?? nothing}
      @change=${(/** @type {Event} */ event) => chats.setModel(/** @type {HTMLSelectElement} */ (event.target).value)}>
      ${models.map((each) => html`<option value=${each.id} title=${each.reason ?? nothing} .selected=${live(each.id === chosen)}>${label(each)}</option>`)}
    </select>`;
  }

  _dialog() {
    const close = () => { this.dialog = ""; };
    if (this.dialog === "settings") return html`<settings-dialog @close=${close}></settings-dialog>`;
    if (this.dialog === "key") return html`<key-dialog @close=${close}></key-dialog>`;
    if (this.dialog === "help") return html`<help-dialog @close=${close}></help-dialog>`;
    return nothing;
  }
}

customElements.define("infer-app", InferApp);
