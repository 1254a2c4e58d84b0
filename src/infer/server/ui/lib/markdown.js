/** Markdown that a model wrote, as DOM nodes without anything that acts: no HTML, no images, links
 * to http(s) and mailto only. What `marked` makes goes through DOMPurify all the same. */

import { DOMPurify, Marked } from "../vendor/core.js";

/** Longest formula, code and block (in characters) that is worked on; longer ones stay plain text. */
const MAX_FORMULA = 4000;
const MAX_CODE = 60_000;
export const MAX_BLOCK = 60_000;
const LINK = /^(?:https?:\/\/|mailto:)/i;

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
}

/** @param {string} text @param {boolean} isBlock */
function formula(text, isBlock) {
  return `<span class="math" data-block="${isBlock ? 1 : 0}">${escaped(text)}</span>`;
}

const marked = new Marked({ gfm: true, async: false, silent: true });
marked.use({
  extensions: [
    {
      name: "math",
      level: "inline",
      start: (text) => text.match(/\$|\\\(|\\\[/)?.index,
      tokenizer(text) {
        const found = /^\$\$([^$]{1,4000}?)\$\$/.exec(text) ?? /^\\\[([^]{1,4000}?)\\\]/.exec(text)
          ?? /^\\\(([^]{1,4000}?)\\\)/.exec(text) ?? /^\$(?![\s\d])([^$\n]{1,1000}?)(?<![\s\\])\$(?!\d)/.exec(text)
          ?? /^\$(?=\d)([^$\n]*[\\^_=+*/][^$\n]*?)(?<![\s\\])\$(?!\d)/.exec(text.slice(0, 1000));
        if (!found) return undefined;
        const isBlock = found[0].startsWith("$$") || found[0].startsWith("\\[");
        return { type: "math", raw: found[0], text: found[1], isBlock };
      },
      renderer: (token) => formula(token.text, token.isBlock),
    },
    {
      name: "mathBlock",
      level: "block",
      start: (text) => text.match(/^(?:\$\$|\\\[)/m)?.index,
      tokenizer(text) {
        const found = /^\$\$\n?([^$]{1,4000}?)\n?\$\$(?:\n|$)/.exec(text) ?? /^\\\[\n?([^]{1,4000}?)\n?\\\](?:\n|$)/.exec(text);
        return found ? { type: "mathBlock", raw: found[0], text: found[1] } : undefined;
      },
      renderer: (token) => `<p>${formula(token.text, true)}</p>`,
    },
  ],
  renderer: {
    html: ({ text }) => escaped(text),
    // Behind an inline <script>, <pre> or the like, marked takes text for HTML and leaves it as it is.
    text: (token) => ("escaped" in token && token.escaped ? escaped(token.text) : false),
    image: ({ text, href }) => escaped(text || href),
    link({ href, tokens }) {
      const inner = this.parser.parseInline(tokens);
      if (!LINK.test(href)) return inner;
      return `<a href="${escaped(href)}" rel="noopener noreferrer" target="_blank">${inner}</a>`;
    },
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = /^[\w+#.-]{1,20}/.exec(lang ?? "")?.[0] ?? "";
      return `<pre data-lang="${escaped(name)}"><code>${escaped(text)}</code></pre>`;
    },
  },
});

const SAFE = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del",
    "a", "table", "thead", "tbody", "tr", "th", "td", "span", "sub", "sup",
  ],
  ALLOWED_ATTR: ["href", "rel", "target", "start", "align", "class", "data-lang", "data-block"],
  ALLOWED_URI_REGEXP: LINK, // of every attribute, except those of the next line
  ADD_URI_SAFE_ATTR: ["rel", "target", "start", "align", "data-lang", "data-block"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const SAFE_CODE = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const MATHML = {
  USE_PROFILES: { mathMl: true }, FORBID_ATTR: ["style", "href", "xlink:href"], FORBID_TAGS: ["style", "annotation", "annotation-xml", "maction"],
  ADD_TAGS: ["span", "semantics"], KEEP_CONTENT: false, RETURN_DOM_FRAGMENT: true,
};

/** The blocks (`raw` text) of a Markdown text. @param {string} text @returns {string[]} */
export function blocksOf(text) {
  /** @type {string[]} */
  const blocks = [];
  for (const token of marked.lexer(text)) {
    if (token.type === "space" && blocks.length) blocks[blocks.length - 1] += token.raw;
    else blocks.push(token.raw);
  }
  return blocks;
}

/** @param {string} text @returns {DocumentFragment} */
export function rendered(text) {
  if (text.length > MAX_BLOCK) return plain(text);
  let made;
  try {
    made = /** @type {string} */ (marked.parse(text));
  } catch {
    return plain(text);
  }
  const fragment = /** @type {DocumentFragment} */ (/** @type {unknown} */ (DOMPurify.sanitize(made, SAFE)));
  for (const link of fragment.querySelectorAll("a")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const block of fragment.children) block.setAttribute("dir", "auto");
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    frame.setAttribute("role", "group");
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** @param {string} text */
function plain(text) {
  const fragment = document.createDocumentFragment();
  const block = document.createElement("div");
  block.className = "plain-text";
  block.textContent = text;
  fragment.append(block);
  return fragment;
}

/** Colour the code and set the formulas of finished blocks. The libraries are loaded when the first
 * one is needed. @param {HTMLElement} root @param {(pre: HTMLElement) => void} dress */
export async function finish(root, dress) {
  const blocks = [...root.querySelectorAll("pre")];
  blocks.forEach(dress);
  const coded = blocks.filter((pre) => pre.dataset.lang && (pre.textContent ?? "").length < MAX_CODE);
  const formulas = [...root.querySelectorAll("span.math:not([data-set])")].slice(0, 500);
  await Promise.all([colour(coded), setFormulas(/** @type {HTMLElement[]} */ (formulas))]);
}

/** @param {HTMLElement[]} blocks */
async function colour(blocks) {
  if (!blocks.length) return;
  const { default: hljs } = await import("../vendor/highlight.js");
  for (const pre of blocks) {
    const code = pre.querySelector("code");
    const name = pre.dataset.lang ?? "";
    if (!code || !hljs.getLanguage(name)) continue;
    const made = hljs.highlight(code.textContent ?? "", { language: name, ignoreIllegals: true }).value;
    code.replaceChildren(/** @type {Node} */ (/** @type {unknown} */ (DOMPurify.sanitize(made, SAFE_CODE))));
  }
}

/** @param {HTMLElement[]} spans */
async function setFormulas(spans) {
  if (!spans.length) return;
  const { default: katex } = await import("../vendor/katex.js");
  for (const span of spans) {
    const text = span.textContent ?? "";
    span.dataset.set = "1";
    if (text.length > MAX_FORMULA) continue;
    try {
      const made = katex.renderToString(text, {
        output: "mathml", displayMode: span.dataset.block === "1", throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20,
      });
      if (made.length > 100_000) continue;
      span.replaceChildren(/** @type {Node} */ (/** @type {unknown} */ (DOMPurify.sanitize(made, MATHML))));
      span.querySelector("math")?.setAttribute("aria-label", text);
    } catch {
      // Not a formula: the text stays as it was written.
    }
  }
}
