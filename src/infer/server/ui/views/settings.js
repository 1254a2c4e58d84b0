/** `<settings-dialog>`: how the open conversation is answered, and where conversations are kept. */

import { html, live, nothing } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { number, t } from "../lib/i18n.js";
import { keep, recall } from "../lib/local.js";
import { PRESETS, SAMPLING, faultOf, fieldOf, modelOf, parsed } from "../lib/request.js";
import { PageDialog } from "./dialog.js";
import "./transfer.js";

class SettingsDialog extends PageDialog {
  static properties = { tick: { state: true } };

  constructor() {
    super();
    this.tick = 0;
    this.hears(server, "change"); // the fields and their limits may come later
  }

  get heading() {
    return "settings.title";
  }

  get conversation() {
    return /** @type {import("../lib/records.js").Conversation} */ (chats.current);
  }

  /** @param {string} name @param {any} value */
  _set(name, value) {
    if (value === null || value === undefined || value === "") delete this.conversation.sampling[name];
    else this.conversation.sampling[name] = value;
    void chats.keepSettings();
    this.tick++;
  }

  content() {
    void import("./mcp_tools.js");
    if (!chats.current) return nothing;
    return html`
      <label class="field">${t("settings.system")}
        <textarea rows="3" dir="auto" .value=${live(this.conversation.system)}
          @change=${(/** @type {Event} */ event) => { this.conversation.system = textOf(event); void chats.keepSettings(); }}></textarea></label>
      <fieldset><legend>${t("settings.sampling")}</legend>
        <div class="row" role="group" aria-label=${t("preset.label")}>
          ${Object.entries(PRESETS).map(([name, values]) => html`<button class="plain" aria-pressed=${this._isPreset(values)}
            @click=${() => this._preset(values)}>${t(`preset.${name}`)}</button>`)}
          ${Object.entries(recall("presets", /** @type {Record<string, any>} */ ({}))).map(([name, values]) => html`<button class="plain" dir="auto"
            aria-pressed=${this._isPreset(values)} @click=${() => this._preset(values)}>${name}</button>`)}
        </div>
        <div class="grid">${SAMPLING.map((name) => this._field(name))}</div>
        ${this._ownPresets()}
      </fieldset>
      <fieldset><legend>${t("settings.form")}</legend>
        <label class="check"><input type="checkbox" .checked=${this.conversation.sampling.stream !== false}
          @change=${(/** @type {Event} */ event) => this._set("stream", isChecked(event) ? null : false)}> ${t("settings.stream")}</label>
        ${this._json("schema", "settings.schema", "settings.schema-hint", 4, (value) => typeof value === "object" && value !== null)}
        ${this._json("tools", "settings.tools", "settings.tools-hint", 6, Array.isArray)}
        <mcp-tools .conversation=${this.conversation} @switched=${() => { void chats.keepSettings(); this.tick++; }}></mcp-tools>
        ${this.conversation.tools.trim() ? this._choice() : nothing}
        ${this._json("extra", "settings.extra", "settings.extra-hint", 2, (value) => typeof value === "object" && value !== null && !Array.isArray(value))}
      </fieldset>
      <fieldset><legend>${t("settings.keeping")}</legend>
        <label class="check"><input type="checkbox" .checked=${recall("newOnServer", false)}
          @change=${(/** @type {Event} */ event) => { keep("newOnServer", isChecked(event)); if (isChecked(event)) { keep("hasSessions", true); void chats.load(chats.current?.id ?? ""); } }}> ${t("settings.on-server")}</label>
        <label class="check"><input type="checkbox" .checked=${recall("hasSessions", false)}
          @change=${(/** @type {Event} */ event) => { keep("hasSessions", isChecked(event)); void chats.load(chats.current?.id ?? ""); }}> ${t("settings.show-server")}</label>
        <transfer-panel></transfer-panel>
      </fieldset>
    `;
  }

  /** @param {Record<string, any>} values */
  _isPreset(values) {
    return SAMPLING.every((name) => name === "seed" || name === "max_tokens" || (this.conversation.sampling[name] ?? null) === (values[name] ?? null));
  }

  /** @param {Record<string, any>} values */
  _preset(values) {
    const { seed, max_tokens: most, stream, extra, model } = this.conversation.sampling;
    this.conversation.sampling = JSON.parse(JSON.stringify({ seed, max_tokens: most, stream, extra, model, ...values }));
    void chats.keepSettings();
    this.tick++;
  }

  _ownPresets() {
    const own = recall("presets", /** @type {Record<string, any>} */ ({}));
    return html`<div class="row">
      <input class="preset-name" maxlength="40" aria-label=${t("preset.name")} placeholder=${t("preset.name")}>
      <button class="plain" @click=${() => {
        const field = /** @type {HTMLInputElement} */ (this.querySelector(".preset-name"));
        const { stream: _s, extra: _e, model: _m, ...values } = this.conversation.sampling;
        if (field.value.trim()) keep("presets", { ...own, [field.value.trim()]: values });
        field.value = "";
        this.tick++;
      }}>${t("preset.save")}</button>
      ${Object.keys(own).length ? html`<button class="danger" @click=${() => { keep("presets", {}); this.tick++; }}>${t("preset.clear")}</button>` : nothing}
    </div>`;
  }

  /** @param {string} name */
  _field(name) {
    const field = fieldOf(name, modelOf(this.conversation));
    if (!field) return nothing;
    const value = this.conversation.sampling[name];
    const fault = faultOf(field, value);
    const id = `setting-${name}`;
    const label = t(`field.${name}`);
    if (field.kind === "boolean") {
      return html`<label class="check"><input type="checkbox" id=${id} .checked=${Boolean(value ?? field.default)}
        @change=${(/** @type {Event} */ event) => this._set(name, isChecked(event) === field.default ? null : isChecked(event))}> ${label}</label>`;
    }
    if (field.kind === "choice") {
      return html`<label class="field">${label}<select id=${id} @change=${(/** @type {Event} */ event) => this._set(name, textOf(event))}>
        <option value="" ?selected=${!value}>${t("settings.default")}</option>
        ${(field.values ?? []).map((each) => html`<option value=${each} ?selected=${each === value}>${each}</option>`)}</select></label>`;
    }
    if (field.kind === "lines") {
      return html`<label class="field wide">${label}<textarea id=${id} rows="2" aria-invalid=${Boolean(fault)} placeholder=${field.default.join("\n")} .value=${live((value ?? []).join("\n"))}
        @change=${(/** @type {Event} */ event) => this._set(name, textOf(event).split("\n").filter(Boolean))}></textarea>
        <span class="hint">${t("settings.lines", { n: field.max ?? 0 })}${field.source ? ` · ${t("settings.default-from", { value: field.default.join(", "), source: field.source })}` : nothing}</span>${fault ? html`<span class="fault-text">${t(fault, { n: field.max ?? 0 })}</span>` : nothing}</label>`;
    }
    const range = t(field.zero ? "settings.range-or-zero" : field.isAbove ? "settings.range-above" : "settings.range", { min: number(field.min ?? 0, { maximumFractionDigits: 3 }), max: number(field.max ?? 0) });
    const isOpen = field.max === undefined || field.max > 2 ** 30;
    const shown = field.default === null ? "" : number(field.default, { maximumFractionDigits: 3 });
    const hint = !shown ? t("settings.no-default") : field.source ? t("settings.default-from", { value: shown, source: field.source }) : t("settings.default-is", { value: shown });
    return html`<label class="field">${label}
      <input id=${id} type="text" inputmode="decimal" autocomplete="off" aria-invalid=${Boolean(fault)} aria-describedby=${`${id}-hint`}
        placeholder=${field.default ?? ""} .value=${live(value === undefined ? "" : String(value))}
        @change=${(/** @type {Event} */ event) => this._set(name, numberOf(textOf(event)))}>
      <span class="hint" id=${`${id}-hint`}>${hint}${isOpen ? nothing : ` · ${range}`}</span>
      ${fault ? html`<span class="fault-text" role="alert">${t(fault, { range })}</span>` : nothing}</label>`;
  }

  /** A field of JSON: what is no JSON is kept as it is typed, named, and not sent.
   * @param {"schema" | "tools" | "extra"} name @param {string} label @param {string} hint @param {number} rows
   * @param {(value: any) => boolean} fits */
  _json(name, label, hint, rows, fits) {
    const { conversation } = this;
    const text = name === "extra" ? conversation.sampling.extra ?? "" : conversation[name];
    const value = parsed(text);
    const isWrong = Boolean(text.trim()) && (value === undefined || !fits(value));
    return html`<label class="field">${t(label)}
      <textarea class="mono" rows=${rows} spellcheck="false" dir="ltr" aria-invalid=${isWrong} .value=${live(text)}
        @change=${(/** @type {Event} */ event) => {
          if (name === "extra") this._set("extra", textOf(event));
          else { conversation[name] = textOf(event); void chats.keepSettings(); this.tick++; }
        }}></textarea>
      <span class="hint">${t(hint)}</span>
      ${isWrong ? html`<span class="fault-text" role="alert">${t(value === undefined ? "fault.json" : "fault.shape")}</span>` : nothing}</label>`;
  }

  _choice() {
    const tools = parsed(this.conversation.tools);
    const names = Array.isArray(tools) ? tools.map((each) => String(each?.function?.name ?? "")).filter(Boolean) : [];
    return html`<label class="field">${t("settings.tool-choice")}
      <select @change=${(/** @type {Event} */ event) => { this.conversation.toolChoice = textOf(event); void chats.keepSettings(); }}>
        ${["auto", "none", "required"].map((each) => html`<option value=${each} ?selected=${each === this.conversation.toolChoice}>${t(`choice.${each}`)}</option>`)}
        ${names.map((each) => html`<option value=${each} ?selected=${each === this.conversation.toolChoice}>${each}</option>`)}
      </select></label>`;
  }
}

/** @param {Event} event */
function textOf(event) {
  return /** @type {HTMLInputElement} */ (event.target).value;
}

/** @param {Event} event */
function isChecked(event) {
  return /** @type {HTMLInputElement} */ (event.target).checked;
}

/** The number of a text, in which the fraction may begin with a comma; the text where it has none.
 * @param {string} text */
function numberOf(text) {
  const trimmed = text.trim().replace(",", ".");
  if (!trimmed) return null;
  const value = Number(trimmed);
  return Number.isNaN(value) ? trimmed : value;
}

customElements.define("settings-dialog", SettingsDialog);
