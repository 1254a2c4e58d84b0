/** Text files that go with a message. */

import { size, t } from "./i18n.js";
import { plainLine } from "./records.js";

const MAX_BYTES = 1024 * 1024;
const MAX_FILES = 10;
/** First bytes of files that are no text, by what they are: `picture`, `pdf`, `archive`, `media` or `program`. Letters stand
 * for themselves, `?` for any byte. @type {Array<[string, string]>} */
const SIGNATURES = [
  ["picture", "\x89PNG"], ["picture", "\xff\xd8\xff"], ["picture", "GIF8"], ["picture", "RIFF????WEBP"], ["picture", "BM????\0\0"],
  ["picture", "II*\0"], ["picture", "MM\0*"], ["picture", "????ftypavif"], ["picture", "????ftyphei"], ["pdf", "%PDF-"],
  ["archive", "PK\x03\x04"], ["archive", "\x1f\x8b\x08"], ["archive", "7z\xbc\xaf"], ["archive", "Rar!"], ["archive", "BZh"], ["archive", "\xfd7zXZ"],
  ["archive", "\xd0\xcf\x11\xe0"], ["media", "ID3"], ["media", "OggS"], ["media", "fLaC"], ["media", "RIFF????WAVE"], ["media", "RIFF????AVI "],
  ["media", "????ftyp"], ["media", "\x1a\x45\xdf\xa3"], ["program", "\x7fELF"], ["program", "MZ"], ["program", "\xca\xfe\xba\xbe"], ["program", "\0asm"],
];

/** What a file is by its first bytes; "" where they may be text. @param {Uint8Array} head */
function kindOf(head) {
  const fits = (/** @type {string} */ signature) => head.length >= signature.length
    && Array.from(signature).every((char, i) => char === "?" || head[i] === char.charCodeAt(0));
  const found = SIGNATURES.find(([, signature]) => fits(signature));
  // Two letters alone may begin a text.
  if (!found || (found[1].length < 3 && !head.includes(0))) return "";
  return found[0];
}

/** A long text that was pasted, as a file; or why it is not taken.
 * @param {string} text @param {import("./records.js").TextFile[]} before files that the message has already */
export function pastedFile(text, before) {
  const numBytes = new Blob([text]).size;
  let name = t("files.pasted");
  for (let i = 2; before.some((each) => each.name === name); i++) name = `${t("files.pasted")} ${i}`;
  if (before.length >= MAX_FILES) return { fault: t("files.many", { name, n: MAX_FILES }) };
  if (numBytes > MAX_BYTES) return { fault: t("files.long", { name, size: size(numBytes), most: size(MAX_BYTES) }) };
  return { file: { name, size: numBytes, text } };
}

/** Read files as text. Those that are no text, or too long, are named with the reason.
 * @param {File[]} files @param {number} numBefore files that the message has already */
export async function readFiles(files, numBefore) {
  /** @type {import("./records.js").TextFile[]} */
  const taken = [];
  /** @type {string[]} */
  const faults = [];
  for (const file of files) {
    const name = plainLine(file.name).slice(0, 120) || "?";
    if (numBefore + taken.length >= MAX_FILES) {
      faults.push(t("files.many", { name, n: MAX_FILES }));
      continue;
    }
    const head = await file.slice(0, 16).arrayBuffer().catch(() => new ArrayBuffer(0));
    const kind = kindOf(new Uint8Array(head));
    if (kind) {
      faults.push(t(`files.${kind}`, { name }));
      continue;
    }
    if (file.size > MAX_BYTES) {
      faults.push(t("files.long", { name, size: size(file.size), most: size(MAX_BYTES) }));
      continue;
    }
    try {
      const bytes = await file.arrayBuffer();
      const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
      if (text.includes("\0")) faults.push(t("files.binary", { name }));
      else taken.push({ name, size: file.size, text });
    } catch (error) {
      faults.push(t(error instanceof TypeError ? "files.encoding" : "files.unreadable", { name }));
    }
  }
  return { taken, faults };
}
