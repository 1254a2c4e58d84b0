/** `<text-view>`: a text in Markdown that may still grow. Finished blocks are never parsed again:
 * a new piece costs the parsing of the last block, at most once a frame. */

import { blocksOf, finish, MAX_BLOCK, rendered } from "./markdown.js";
import { t } from "./i18n.js";

/** Characters that are parsed at once. A block that is longer while it grows is plain text. */
const CHUNK = 8000;

class TextView extends HTMLElement {
  constructor() {
    super();
    this._text = "";
    /** The text as it is to be drawn next. */
    this._next = "";
    this._isOpen = false;
    this._wasOpen = false;
    /** Whether more of the text is to be drawn in the next frame. */
    this._isPartial = false;
    /** How much of the text stands in finished blocks, in characters. */
    this._numDone = 0;
    /** @type {HTMLElement | null} */
    this._tail = null;
    this._frame = 0;
    this._restMs = 0;
    this._drawnAt = 0;
  }

  /** @param {{text: string, isOpen: boolean}} value */
  set value({ text, isOpen }) {
    this._next = text;
    this._isOpen = isOpen;
    if (isOpen) this._later();
    else {
      cancelAnimationFrame(this._frame);
      this._frame = 0;
      this._draw();
    }
  }

  _clear() {
    this.replaceChildren();
    this._tail = null;
    this._numDone = 0;
  }

  /** Draw in the next frame, and rest longer where drawing takes long. */
  _later() {
    if (this._frame) return;
    this._frame = requestAnimationFrame(() => {
      this._frame = 0;
      const now = performance.now();
      if (now - this._drawnAt < this._restMs) return this._later();
      this._draw();
      this._drawnAt = performance.now();
      this._restMs = this._isPartial ? 0 : Math.min(500, 4 * (this._drawnAt - now));
      return undefined;
    });
  }

  _draw() {
    const text = this._next.includes("\r") ? this._next.replace(/\r\n?/g, "\n") : this._next;
    if (text === this._text && this._isOpen === this._wasOpen && !this._isPartial) return;
    if (!text.startsWith(this._text.slice(0, this._numDone))) this._clear();
    this._text = text;
    this._wasOpen = this._isOpen;
    const rest = text.slice(this._numDone);
    const end = rest.length > CHUNK ? cutAt(rest) : 0;
    this._isPartial = end > 0;
    if (end) {
      this._finish(rest.slice(0, end));
      this._later();
    } else if (this._isOpen && rest.length > CHUNK) this._growPlain(rest);
    else this._drawEnd(partsOf(rest));
  }

  /** Draw the last blocks. @param {string[]} blocks */
  _drawEnd(blocks) {
    const numDone = this._isOpen ? blocks.length - 1 : blocks.length;
    for (const block of blocks.slice(0, Math.max(0, numDone))) this._finish(block);
    const last = blocks[numDone];
    if (last === undefined) {
      this._tail?.remove();
      this._tail = null;
      return;
    }
    this._tail ??= this.appendChild(document.createElement("div"));
    this._tail.className = "block";
    this._tail.replaceChildren(rendered(last));
    this.append(this._tail);
  }

  /** A block that is too long to be parsed again and again grows as plain text.
   * @param {string} rest */
  _growPlain(rest) {
    if (!this._tail?.classList.contains("plain-text")) {
      this._tail?.remove();
      this._tail = this.appendChild(document.createElement("div"));
      this._tail.className = "block plain-text";
      this._tail.append(document.createTextNode(""));
    }
    const node = /** @type {Text} */ (this._tail.firstChild);
    node.appendData(rest.slice(node.length));
  }

  /** @param {string} block */
  _finish(block) {
    const made = document.createElement("div");
    made.className = "block";
    made.append(rendered(block));
    if (this._tail) {
      this._tail.replaceWith(made);
      this._tail = null;
    } else this.append(made);
    this._numDone += block.length;
    void finish(made, dress);
  }
}

/** Where a long text can be cut: after an empty line that is not inside of code. 0 = nowhere.
 * @param {string} text */
function cutAt(text) {
  let isCode = false;
  let at = 0;
  for (const found of text.matchAll(/^ {0,3}(?:```|~~~)|\n\n+/gm)) {
    if (found[0][0] !== "\n") isCode = !isCode;
    else if (!isCode && found.index > 0) {
      at = found.index + found[0].length;
      if (at >= CHUNK / 2) return at < text.length ? at : 0;
    }
  }
  return at < text.length ? at : 0;
}

/** @param {string} text */
function partsOf(text) {
  return text.length > MAX_BLOCK ? [text] : blocksOf(text);
}

/** A block of code gets its language and a button that copies it. @param {HTMLElement} pre */
function dress(pre) {
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = pre.dataset.lang || t("code.text");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = t("act.copy");
  copy.setAttribute("aria-label", t("act.copy-code"));
  copy.addEventListener("click", () => {
    void copyText(pre.querySelector("code")?.textContent ?? "").then((done) => {
      copy.textContent = done ? t("act.copied") : t("act.not-copied");
      setTimeout(() => { copy.textContent = t("act.copy"); }, 1500);
    });
  });
  head.append(name, copy);
  pre.tabIndex = 0;
  const frame = document.createElement("div");
  frame.className = "code";
  pre.replaceWith(frame);
  frame.append(head, pre);
}

/** @param {string} text @returns {Promise<boolean>} whether it was copied */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "unseen";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

customElements.define("text-view", TextView);
