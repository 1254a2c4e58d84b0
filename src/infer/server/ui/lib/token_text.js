/** Probabilities of tokens, and the text that token ids stand for. */

import { askJson } from "./api.js";

/** @typedef {{id: number, label: string, logprob: number | null, others: Array<{id: number, label: string, logprob: number}>}} Token */

/** Most tokens whose probabilities are asked for at once. */
export const MAX_TOKENS = 2000;
/** Most tokens whose text can be held back. */
const MAX_HELD = 4;
/** Alternatives that are shown for a token. */
const NUM_OTHERS = 8;

/** The tokens of a prompt with their probabilities and the best alternatives at each place.
 * @param {string} model @param {number[]} ids @param {AbortSignal} [signal] @returns {Promise<Token[]>} */
export async function scored(model, ids, signal) {
  const body = { model, prompt: ids, max_tokens: 0, prompt_logprobs: NUM_OTHERS, return_token_ids: true };
  const answer = await askJson("/v1/completions", { body, signal });
  const entries = answer.choices[0].prompt_logprobs;
  return ids.map((id, i) => {
    const entry = entries[i] ?? {};
    const others = Object.entries(entry).map(([other, { logprob, decoded_token: label }]) => ({ id: Number(other), label: String(label), logprob }))
      .sort((a, b) => b.logprob - a.logprob);
    const own = others.find((each) => each.id === id);
    return { id, label: own?.label ?? "", logprob: own?.logprob ?? null, others };
  });
}

/** The bytes of a token: its label is text, or `bytes:\xe2\x82` where that is no UTF-8.
 * @param {string} label */
function bytesOf(label) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(label)) return new TextEncoder().encode(label);
  return Uint8Array.from(label.matchAll(/\\x([0-9a-f]{2})/g), (found) => Number.parseInt(found[1], 16));
}

/** @param {string[]} labels */
export function textOf(labels) {
  const decoder = new TextDecoder();
  return labels.map((label) => decoder.decode(bytesOf(label), { stream: true })).join("") + decoder.decode();
}

/** The ids that stand for a text which broke off: without the last ones where their text was held
 * back, because a character lacks bytes or a stop string may follow.
 * @param {string} model @param {number[]} ids @param {string} text */
export async function settledIds(model, ids, text) {
  for (let num = ids.length; num > Math.max(0, ids.length - MAX_HELD); num--) {
    const body = { model, tokens: ids.slice(0, num) };
    const found = await askJson("/detokenize", { body }).catch(() => null);
    if (!found) break;
    if (found.prompt === text) return body.tokens;
  }
  return ids;
}

/** The class of a probability's colour, from `p0` (unlikely) to `p4`. @param {number | null} logprob */
export function shade(logprob) {
  if (logprob === null) return "";
  const chance = Math.exp(logprob);
  return `p${[0.05, 0.25, 0.6, 0.9].filter((limit) => chance >= limit).length}`;
}
