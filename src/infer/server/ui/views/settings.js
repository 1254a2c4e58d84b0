/** `<settings-dialog>`: how the open conversation is answered, and where conversations are kept. */

import { html, live, nothing } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { learn, number, t } from "../lib/i18n.js";
import en from "../lang/settings_en.js";
import zh from "../lang/settings_zh.js";
import { keep, recall } from "../lib/local.js";
import { PRESETS, SAMPLING, faultOf, fieldOf, modelOf, parsed, toolsOf } from "../lib/request.js";
import { glyphs } from "../lib/glyphs.js";
import { PageDialog } from "./dialog.js";
import "./transfer.js";

learn({ en, zh });
/** Bytes of a file of tools that is read. */
const MAX_TOOLS_BYTES = 1024 * 1024;
/** Sampling settings that most people look for; the others are behind *More*. */
const FIRST = ["temperature", "max_tokens", "reasoning_effort"];

class SettingsDialog extends PageDialog {
  static properties = { tick: { state: true } };

  constructor() {
    super();
    this.tick = 0;
    /** Why a file of tools was not taken. */
    this.toolsFault = "";
    this.hears(server, "change"); // the fields and their limits may come later
    void chats.opened.then(() => this.requestUpdate());
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
          @change=${(/** @type {Event} */ event) => { this.conversation.system = textOf(event); void chats.keepSettings(); this.tick++; }}></textarea></label>
      <div class="row small"><span class="quiet grow">${t("settings.system-hint")}</span>
        <button class="plain" ?disabled=${recall("system", "") === this.conversation.system}
          @click=${() => { keep("system", this.conversation.system); this.tick++; }}>${t("settings.system-default")}</button></div>
      <fieldset><legend>${t("settings.sampling")}</legend>
        <div class="row" role="group" aria-label=${t("preset.label")}>
          ${Object.entries(PRESETS).map(([name, values]) => html`<button class="plain" aria-pressed=${this._isPreset(values)}
            @click=${() => this._preset(values)}>${t(`preset.${name}`)}</button>`)}
          ${Object.entries(recall("presets", /** @type {Record<string, any>} */ ({}))).map(([name, values]) => html`<span class="own-preset"><button class="plain" dir="auto"
            aria-pressed=${this._isPreset(values)} @click=${() => this._preset(values)}>${name}</button><button class="icon" aria-label=${t("preset.remove", { name })}
            title=${t("preset.remove", { name })} @click=${() => this._removePreset(name)}>${glyphs.close()}</button></span>`)}
        </div>
        <div class="grid">${FIRST.map((name) => this._field(name))}</div>
        ${this._ownPresets()}
      </fieldset>
      <details class="more" ?open=${recall("more", false)} @toggle=${(/** @type {Event} */ event) => keep("more", /** @type {HTMLDetailsElement} */ (event.target).open)}>
      <summary>${t("settings.more")}</summary>
      <div class="stack">
      <fieldset><legend>${t("settings.more-sampling")}</legend>
        <div class="grid">${SAMPLING.filter((name) => !FIRST.includes(name)).map((name) => this._field(name))}</div>
      </fieldset>
      <fieldset><legend>${t("settings.form")}</legend>
        <label class="check"><input type="checkbox" .checked=${this.conversation.sampling.stream !== false}
          @change=${(/** @type {Event} */ event) => this._set("stream", isChecked(event) ? null : false)}> ${t("settings.stream")}</label>
        ${this._json("schema", "settings.schema", "settings.schema-hint", 4, (value) => typeof value === "object" && value !== null)}
        ${this._json("tools", "settings.tools", "settings.tools-hint", 6, Array.isArray)}
        <div class="row"><button class="plain" @click=${() => /** @type {HTMLElement} */ (this.querySelector(".tools-file")).click()}>${t("settings.tools-file")}</button>
          <input class="tools-file" type="file" hidden accept=".json,application/json" aria-label=${t("settings.tools-file")} @change=${this._toolsFile}>
          ${this.toolsFault ? html`<span class="fault-text" role="alert">${this.toolsFault}</span>` : nothing}</div>
        <mcp-tools .conversation=${this.conversation} @switched=${() => { void chats.keepSettings(); this.tick++; }}></mcp-tools>
        ${this.conversation.tools.trim() ? this._choice() : nothing}
        ${this._json("extra", "settings.extra", "settings.extra-hint", 2, (value) => typeof value === "object" && value !== null && !Array.isArray(value))}
        <label class="check"><input type="checkbox" .checked=${Boolean(this.conversation.forgets)}
          @change=${(/** @type {Event} */ event) => { this.conversation.forgets = isChecked(event); void chats.keepSettings(); }}> ${t("settings.forgets")}</label>
      </fieldset>
      </div></details>
      <fieldset><legend>${t("settings.keeping")}</legend>
        <label class="check"><input type="checkbox" .checked=${recall("newOnServer", false)}
          @change=${(/** @type {Event} */ event) => { keep("newOnServer", isChecked(event)); if (isChecked(event)) { keep("hasSessions", true); void chats.refresh(); } }}> ${t("settings.on-server")}</label>
        <label class="check"><input type="checkbox" .checked=${recall("hasSessions", false)}
          @change=${(/** @type {Event} */ event) => { keep("hasSessions", isChecked(event)); void chats.refresh(); }}> ${t("settings.show-server")}</label>
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
    </div>`;
  }

  /** @param {string} name */
  _removePreset(name) {
    const { [name]: _, ...others } = recall("presets", /** @type {Record<string, any>} */ ({}));
    keep("presets", others);
    this.tick++;
  }

  /** Take tools from a file. @param {Event} event */
  async _toolsFile(event) {
    const field = /** @type {HTMLInputElement} */ (event.target);
    const file = field.files?.[0];
    field.value = "";
    if (!file) return;
    const tools = file.size > MAX_TOOLS_BYTES ? null : toolsOf(parsed(await file.text()), file.name.replace(/\.json$/i, ""));
    this.toolsFault = tools ? "" : t("settings.tools-wrong");
    if (tools) {
      this.conversation.tools = JSON.stringify(tools, null, 1);
      void chats.keepSettings();
    }
    this.tick++;
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
        @change=${(/** @type {Event} */ event) => this._set(name, isChecked(event) === field.default ? null : isChecked(event))}> <span>${label}<br><span class="hint quiet small">${t(`about.${name}`)}</span></span></label>`;
    }
    if (field.kind === "choice") {
      return html`<label class="field">${label}<select id=${id} @change=${(/** @type {Event} */ event) => this._set(name, textOf(event))}>
        <option value="" ?selected=${!value}>${t("settings.default")}</option>
        ${(field.values ?? []).map((each) => html`<option value=${each} ?selected=${each === value}>${each}</option>`)}</select>
        <span class="hint">${t(`about.${name}`)}</span></label>`;
    }
    if (field.kind === "lines") {
      return html`<label class="field wide">${label}<textarea id=${id} rows="2" aria-invalid=${Boolean(fault)} placeholder=${field.default.join("\n")} .value=${live((value ?? []).join("\n"))}
        @change=${(/** @type {Event} */ event) => this._set(name, textOf(event).split("\n").filter(Boolean))}></textarea>
        <span class="hint">${t(`about.${name}`)} ${t("settings.lines", { n: field.max ?? 0 })}${field.source ? ` · ${t("settings.default-from", { value: field.default.join(", "), source: field.source })}` : nothing}</span>${fault ? html`<span class="fault-text">${t(fault, { n: field.max ?? 0 })}</span>` : nothing}</label>`;
    }
    const range = t(field.zero ? "settings.range-or-zero" : field.isAbove ? "settings.range-above" : "settings.range", { min: number(field.min ?? 0, { maximumFractionDigits: 3 }), max: number(field.max ?? 0) });
    const isOpen = field.max === undefined || field.max > 2 ** 30;
    const shown = field.default === null ? "" : number(field.default, { maximumFractionDigits: 3 });
    const hint = !shown ? t("settings.no-default") : field.source ? t("settings.default-from", { value: shown, source: field.source }) : t("settings.default-is", { value: shown });
    return html`<label class="field">${label}
      <input id=${id} type="text" inputmode="decimal" autocomplete="off" aria-invalid=${Boolean(fault)} aria-describedby=${`${id}-hint`}
        placeholder=${field.default ?? ""} .value=${live(value === undefined ? "" : String(value))}
        @change=${(/** @type {Event} */ event) => this._set(name, numberOf(textOf(event)))}>
      <span class="hint" id=${`${id}-hint`}>${t(`about.${name}`)} ${hint}${isOpen ? nothing : ` · ${range}`}</span>
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
