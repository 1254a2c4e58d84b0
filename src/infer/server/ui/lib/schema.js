/** Whether an answer fits a JSON schema. */

import { Validator } from "../vendor/schema.js";
import { t } from "./i18n.js";
import { parsed } from "./request.js";

/** @param {object} schema @param {string} text */
export function check(schema, text) {
  const value = parsed(text);
  if (value === undefined) return { fits: false, why: t("schema.no-json") };
  try {
    const { valid, errors } = new Validator(/** @type {any} */ (schema), "2020-12", true).validate(value);
    const error = errors.at(-1);
    return { fits: valid, why: error ? `${error.instanceLocation}: ${error.error}`.slice(0, 300) : "" };
  } catch (error) {
    return { fits: false, why: String(error).slice(0, 300) };
  }
}
