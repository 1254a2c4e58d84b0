/** Text files that go with a message. */

import { size, t } from "./i18n.js";
import { plainLine } from "./records.js";

export const MAX_BYTES = 1024 * 1024;
const MAX_FILES = 10;

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
