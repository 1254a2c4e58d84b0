/** `<what-happened>`: the figures of an answer and the server's trace of its request. */

import { html, nothing } from "../vendor/core.js";
import { ApiError, askJson } from "../lib/api.js";
import { PageElement } from "../lib/element.js";
import { duration, number, rate, t } from "../lib/i18n.js";
import { sentence } from "../lib/errors.js";
import { plainLine, speedOf } from "../lib/records.js";
import { picture } from "./timeline.js";

/** @typedef {import("../lib/records.js").Message} Message */

class WhatHappened extends PageElement {
  static properties = { message: { attribute: false }, trace: { state: true }, error: { state: true } };

  constructor() {
    super();
    /** @type {Message | undefined} */
    this.message = undefined;
    /** @type {any} */
    this.trace = null;
    /** @type {ApiError | null} */
    this.error = null;
  }

  firstUpdated() {
    void this._read();
  }

  async _read() {
    const figures = this.message?.figures;
    if (!figures) return;
    const query = figures.model ? `?model=${encodeURIComponent(figures.model)}` : "";
    try {
      this.trace = await askJson(`/v1/requests/${encodeURIComponent(figures.requestId)}${query}`);
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
  }

  render() {
    const figures = this.message?.figures;
    if (!figures) return nothing;
    return html`<section class="panel" aria-label=${t("happened.label")}>
      ${this._figures(figures)}
      ${figures.promptTokens ? this._share(figures) : nothing}
      ${this._story()}
    </section>`;
  }

  /** @param {NonNullable<Message["figures"]>} figures */
  _figures(figures) {
    const { completionTokens, promptTokens, firstMs, totalMs, cachedTokens } = figures;
    const speed = speedOf(figures);
    const rows = [
      ["happened.tokens-label", t("happened.tokens", { n: completionTokens })],
      ["happened.first-label", firstMs === null ? "–" : duration(firstMs)],
      ["happened.rate-label", speed === null ? "–" : t("happened.rate", { rate: rate(speed) })],
      ["happened.total-label", totalMs === null ? "–" : duration(totalMs)],
      ["happened.prompt-label", number(promptTokens)],
      ["happened.cached-label", number(cachedTokens)],
      ["happened.model", plainLine(figures.model)],
      ["happened.id", figures.requestId],
      ...(this.trace?.replicas ? [["happened.replicas", plainLine(this.trace.replicas.join(", "))]] : []),
      ...(this.trace?.preemptions ? [["happened.preemptions", number(this.trace.preemptions)]] : []),
      ...(this.trace?.restarts ? [["happened.restarts-label", number(this.trace.restarts)]] : []),
    ];
    return html`<dl class="figures-list">${rows.map(([key, value]) => html`<div class=${key === "happened.id" ? "wide" : ""}><dt>${t(key)}</dt><dd>${value}</dd></div>`)}</dl>`;
  }

  /** Which part of the prompt came from the cache. @param {NonNullable<Message["figures"]>} figures */
  _share({ cachedTokens, promptTokens }) {
    const share = cachedTokens / promptTokens;
    return html`<div>
      <div class="share" aria-hidden="true"><svg viewBox="0 0 100 1" preserveAspectRatio="none" class="timeline-bar"><rect class="decode" width=${100 * share} height="1"></rect></svg></div>
      <p class="small quiet">${t("happened.cached-share", { cached: cachedTokens, all: promptTokens, share: number(share, { style: "percent" }) })}</p>
    </div>`;
  }

  _story() {
    const { trace, error } = this;
    if (error) return html`<p class="small quiet">${error.status === 404 ? t("happened.forgotten") : t("happened.unknown", { message: sentence(error) })}</p>`;
    if (!trace) return html`<p class="small quiet">${t("happened.loading")}</p>`;
    return html`<h3>${t("happened.story")}</h3>
      ${picture(trace)}
      <ol class="timeline small">${trace.events.map((/** @type {any} */ event) => html`<li><time>${duration(event.at_ms)}</time><span>${said(event)}</span></li>`)}</ol>
      ${trace.slowest_gaps.length ? html`<h3>${t("happened.gaps")}</h3>
        <ul class="timeline small">${trace.slowest_gaps.map((/** @type {any} */ gap) => html`<li><time>${duration(gap.at_ms)}</time><span>${t("happened.gap", {
          gap: duration(gap.gap_ms), token: gap.token, step: duration(gap.slowest_step.step_ms),
          sequences: gap.slowest_step.sequences, prompt: gap.slowest_step.prompt_tokens,
        })}</span></li>`)}</ul>` : nothing}`;
  }
}

/** An event of a trace in words. @param {any} event */
function said(event) {
  const key = `happened.event.${event.event}`;
  const text = t(key, {
    before: event.waiting_before ?? 0, running: event.running ?? 0, cached: event.cached_tokens ?? 0, of: event.of_tokens ?? 0,
    tokens: event.tokens ?? 0, from: event.from_token ?? 0, lost: event.lost_tokens ?? 0, proposed: event.proposed ?? 0, accepted: event.accepted ?? 0, outcome: String(event.outcome ?? ""),
  });
  if (text === key) return plainLine(String(event.event));
  const where = event.replica && ["queued", "admitted", "resumed"].includes(event.event) ? ` (${plainLine(event.replica)})` : "";
  const names = (event.behind ?? event.needed_by ?? []).slice(0, 3).join(", ");
  return (names ? `${text} ${t("happened.behind", { names })}` : text) + where;
}

customElements.define("what-happened", WhatHappened);
