/** `<comparison-view>`: the batching modes beside one another: the same requests, recorded one mode
 * after the other and played one above the other on one time axis. */

import { html, nothing } from "../vendor/core.js";
import { ApiError, ask, events } from "../lib/api.js";
import { PageElement } from "../lib/element.js";
import { sentence } from "../lib/errors.js";
import { duration, number, rate, t } from "../lib/i18n.js";
import { colours, drawLanes, lanes } from "../engine/draw.js";
import { Frames } from "../engine/frames.js";
import { History } from "../engine/history.js";
import { FORMAT, played, save } from "../engine/recording.js";

/** @typedef {import("../engine/recording.js").Recording} Recording */

/** How long the whole is played, however long it took, in milliseconds. */
const PLAYED_MS = 12_000;
const FRAME_MS = 25;
/** Time that its pictures may take: a film that somebody asked for, on an engine that has nothing else to do. */
const SHARE = 0.5;

class ComparisonView extends PageElement {
  static properties = {
    recordings: { attribute: false }, isRunning: { state: true }, error: { state: true }, isPlaying: { state: true },
    numModes: { state: true },
  };

  constructor() {
    super();
    /** @type {Recording[]} */
    this.recordings = [];
    this.isRunning = false;
    this.isPlaying = false;
    this.error = "";
    /** Modes whose lanes are shown. */
    this.numModes = 0;
    /** Requests that have ended, in all modes, and their number. */
    this.progress = { done: 0, of: 1 };
    this.workload = "mixed";
    this.seats = 8;
    /** @type {import("../engine/history.js").History[]} */
    this.histories = [];
    /** Milliseconds since the first step, up to which the recordings are shown. */
    this.at = 0;
    this.longest = 1;
    this._steppedAt = 0;
    this._frames = new Frames(() => this._step(), FRAME_MS, SHARE);
    this._stop = new AbortController();
    this._calm = matchMedia("(prefers-reduced-motion: reduce)");
    this._resized = () => this._draw();
  }

  connectedCallback() {
    super.connectedCallback();
    addEventListener("resize", this._resized);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    removeEventListener("resize", this._resized);
    this._stop.abort();
    this._frames.stop();
  }

  /** @param {Map<string, unknown>} changed */
  willUpdate(changed) {
    if (!changed.has("recordings") || this.isRunning) return;
    this.numModes = this.recordings.length;
    this.histories = this.recordings.map(played);
    this.longest = Math.max(1, ...this.histories.map((each) => each.now - this._begin(each)));
    this.at = this.longest;
    if (this.recordings.length && !this._calm.matches) this._play();
  }

  updated() {
    this._draw();
  }

  /** @param {import("../engine/history.js").History} history */
  _begin(history) {
    return history.replica("").steps.at[0] ?? history.start;
  }

  /** Compute a comparison, and draw it meanwhile. */
  async run() {
    if (this.isRunning) return;
    this._stop = new AbortController();
    this.isRunning = true;
    this.isPlaying = false;
    this._frames.start();
    this.error = "";
    /** @type {Recording[]} */
    const found = [];
    Object.assign(this, { recordings: [], histories: [], numModes: 0, progress: { done: 0, of: 1 } });
    try {
      const { signal } = this._stop;
      const body = { workload: this.workload, seats: this.seats, stream: true };
      const response = await ask("/v1/engine/comparisons", { body, signal });
      for await (const { name, data } of events(response, signal)) this._take(found, name, JSON.parse(data));
      if (!signal.aborted && found.some((each) => !each.summary)) throw new ApiError("lost", "");
    } catch (error) {
      if (!this._stop.signal.aborted) this.error = error instanceof ApiError ? sentence(error) : String(error);
    }
    this.isRunning = false;
    this.recordings = found.filter((each) => each.summary);
  }

  /** @param {Recording[]} found @param {string} name @param {any} data */
  _take(found, name, data) {
    const recording = found[found.length - 1];
    const history = this.histories[this.histories.length - 1];
    if (name === "comparison") this.progress.of = data.modes.length * data.num_requests;
    else if (name === "error") throw new ApiError("failed", String(data.error?.message ?? ""));
    else if (name === "hello") {
      found.push({ format: FORMAT, hello: data, frames: [] });
      this.histories.push(new History(data));
      this.numModes = this.histories.length;
    } else if (name === "summary") recording.summary = data;
    else if (name === "frame") {
      recording.frames.push(data);
      history.take(data);
      this.progress.done += (data.events ?? []).filter((/** @type {any} */ event) => event.event === "finished").length;
      this.longest = Math.max(1000, ...this.histories.map((each) => each.now - this._begin(each)));
      this.at = this.longest;
    }
  }

  _play() {
    if (this.at >= this.longest) this.at = 0;
    this.isPlaying = true;
    this._steppedAt = performance.now();
    this._frames.start();
  }

  /** The next picture of what is played, or of what is computed. */
  _step() {
    const now = performance.now();
    if (this.isPlaying) this.at = Math.min(this.longest, this.at + (now - this._steppedAt) * Math.max(1, this.longest / PLAYED_MS));
    this._steppedAt = now;
    if (this.at >= this.longest) this.isPlaying = false;
    if (!this.isPlaying && !this.isRunning) this._frames.stop();
    this._draw();
  }

  _draw() {
    const c = colours(this);
    this.querySelectorAll("canvas").forEach((canvas, index) => {
      const history = this.histories[index];
      if (!history || !canvas.clientWidth) return;
      const begin = this._begin(history);
      const to = begin + this.longest;
      const until = Math.min(begin + this.at, history.now);
      const view = { from: begin, to, until, zero: begin, cursor: this.at < this.longest ? begin + this.at : null };
      const words = { seats: t("engine.seat"), queue: t("engine.queue"), selected: null, most: history.hello.seats };
      history.queueRows = 0;
      drawLanes(canvas, history, view, c, words);
    });
    const range = /** @type {HTMLInputElement | null} */ (this.querySelector("input[type=range]"));
    if (range) range.value = String(this.at);
    const done = /** @type {HTMLProgressElement | null} */ (this.querySelector("progress"));
    if (done) Object.assign(done, { max: this.progress.of, value: this.progress.done });
    const said = this.querySelector(".compare-progress");
    if (said) said.textContent = this.progress.of > 1 ? t("compare.progress", this.progress) : "";
  }

  render() {
    return html`<section class="comparison stack" aria-labelledby="comparison-title">
      <h2 id="comparison-title">${t("compare.title")}</h2>
      <p class="quiet small">${t("compare.hint")}</p>
      <div class="row">
        <label class="row small">${t("compare.workload")}
          <select @change=${(/** @type {Event} */ event) => { this.workload = /** @type {HTMLSelectElement} */ (event.target).value; }}>
            ${["mixed", "equal", "long_tail"].map((name) => html`<option value=${name}>${t(`compare.workload.${name}`)}</option>`)}
          </select></label>
        <label class="row small">${t("compare.seats")}
          <select @change=${(/** @type {Event} */ event) => { this.seats = Number(/** @type {HTMLSelectElement} */ (event.target).value); }}>
            ${[2, 4, 8, 16].map((seats) => html`<option value=${seats} ?selected=${seats === this.seats}>${number(seats)}</option>`)}
          </select></label>
        ${this.isRunning
          ? html`<button @click=${() => this._stop.abort()}>${t("compare.stop")}</button><span class="quiet small" role="status">${t("compare.running")}</span>
            <progress aria-label=${t("compare.running")} max="1" value="0"></progress><span class="quiet small compare-progress"></span>`
          : html`<button class="main compare-run" @click=${this.run}>${t("compare.run")}</button>`}
      </div>
      ${this.error ? html`<p class="notice bad" role="alert">${this.error}</p>` : nothing}
      ${this.numModes ? this._result() : nothing}
    </section>`;
  }

  _result() {
    return html`
      ${this.isRunning ? nothing : html`<div class="row">
        <button @click=${() => { if (this.isPlaying) this.isPlaying = false; else this._play(); }}>${t(this.isPlaying ? "engine.pause" : "compare.play")}</button>
        <input class="grow" type="range" min="0" max=${this.longest} step="any" aria-label=${t("compare.time")}
          @input=${(/** @type {Event} */ event) => { this.isPlaying = false; this.at = Number(/** @type {HTMLInputElement} */ (event.target).value); this._draw(); }}>
        <button @click=${() => save(/** @type {any} */ ({ object: "engine.comparison", recordings: this.recordings }), "infer-comparison.json")}>${t("engine.save")}</button>
      </div>`}
      ${this.histories.map((history) => this._lanes(history))}
      ${this.recordings.length ? this._numbers() : nothing}`;
  }

  /** @param {import("../engine/history.js").History} history */
  _lanes(history) {
    const { mode, seats } = history.hello;
    const label = t("compare.lanes-label", { mode: t(`compare.mode.${mode}`) });
    return html`<figure><figcaption>${t(`compare.mode.${mode}`)}</figcaption>
      <canvas height=${lanes(history, seats).height} role="img" aria-label=${label}></canvas></figure>`;
  }

  _numbers() {
    const columns = ["steps", "padding", "first", "speed", "time"];
    return html`<table class="engine-table">
      <caption>${t("compare.caption")}</caption>
      <thead><tr><th scope="col">${t("compare.mode")}</th>${columns.map((name) => html`<th scope="col">${t(`compare.column.${name}`)}</th>`)}</tr></thead>
      <tbody>${this.recordings.map(({ hello, summary }) => html`<tr>
        <th scope="row">${t(`compare.mode.${hello.mode}`)}</th>
        <td>${number(summary?.steps ?? 0)}</td>
        <td>${summary?.padding ? t("compare.times", { value: number(summary.padding, { maximumFractionDigits: 2 }) }) : "–"}</td>
        <td>${duration(summary?.first_token_p99_ms ?? 0)}</td>
        <td>${rate(summary?.output_tok_s ?? 0)}</td>
        <td>${duration(1000 * (summary?.duration_s ?? 0))}</td></tr>`)}</tbody>
    </table>`;
  }
}

customElements.define("comparison-view", ComparisonView);
