/** The page's texts in the reader's language. Catalogues are in `lang/`; each has the same keys. */

import en from "../lang/en.js";
import { recall, keep } from "./local.js";

/** @type {Record<string, Record<string, string>>} */
const CATALOGUES = { en };
/** Catalogues that are loaded when somebody reads them.
 * @type {Record<string, () => Promise<{default: Record<string, string>}>>} */
const OTHERS = { zh: () => import("../lang/zh.js") };

/** Languages by their code, each in its own words. */
export const LANGUAGES = { en: "English", zh: "中文" };

class Language extends EventTarget {
  constructor() {
    super();
    const wanted = [recall("language", ""), ...navigator.languages];
    this.code = wanted.map((each) => each.slice(0, 2)).find((each) => each in LANGUAGES) ?? "en";
    document.documentElement.lang = this.code;
  }

  /** Load the catalogue of the language; without it the page is in English. */
  async load() {
    try {
      CATALOGUES[this.code] ??= (await OTHERS[this.code]()).default;
    } catch {
      this.code = "en";
    }
    document.documentElement.lang = this.code;
  }

  /** @param {string} code */
  async choose(code) {
    this.code = code in LANGUAGES ? code : "en";
    keep("language", this.code);
    await this.load();
    this.dispatchEvent(new Event("change"));
  }
}

export const language = new Language();
await language.load();
/** Making a format takes longer than using it. @type {Map<string, Intl.NumberFormat>} */
const formats = new Map();

/** Add the texts of a view that is loaded later, by language.
 * @param {Record<string, Record<string, string>>} texts */
export function learn(texts) {
  for (const [code, more] of Object.entries(texts)) Object.assign(CATALOGUES[code], more);
}

/** The text of a key, with `{name}` replaced. With `n`, the key's form for that number is taken:
 * `key.one` or `key.other`.
 * @param {string} key
 * @param {Record<string, string | number>} [values] */
export function t(key, values = {}) {
  const catalogue = CATALOGUES[language.code] ?? en;
  let text = catalogue[key];
  if (text === undefined && typeof values.n === "number") {
    const form = new Intl.PluralRules(language.code).select(values.n);
    text = catalogue[`${key}.${form}`] ?? catalogue[`${key}.other`];
  }
  if (text === undefined) return key;
  return text.replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name] ?? "";
    return typeof value === "number" ? number(value) : value;
  });
}

/** @param {number} value @param {Intl.NumberFormatOptions} [options] */
export function number(value, options = {}) {
  const name = `${language.code} ${JSON.stringify(options)}`;
  let format = formats.get(name);
  if (!format) {
    format = new Intl.NumberFormat(language.code, { maximumFractionDigits: 1, ...options });
    formats.set(name, format);
  }
  return format.format(value);
}

/** Tokens a second. @param {number} value */
export function rate(value) {
  return number(value, { maximumFractionDigits: value < 100 ? 1 : 0 });
}

/** A duration in the unit that suits it. @param {number} ms */
export function duration(ms) {
  if (ms < 1000) return t("unit.ms", { value: number(ms, { maximumFractionDigits: ms < 10 ? 1 : 0 }) });
  return t("unit.s", { value: number(ms / 1000, { maximumFractionDigits: ms < 10000 ? 2 : 1 }) });
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1024) return t("unit.bytes", { n: bytes });
  if (bytes < 1024 * 1024) return t("unit.kib", { value: number(bytes / 1024) });
  return t("unit.mib", { value: number(bytes / 1024 / 1024) });
}

/** @param {number} ms since 1970 */
export function day(ms) {
  return new Intl.DateTimeFormat(language.code, { dateStyle: "medium", timeStyle: "short" }).format(ms);
}
