/** A sentence for each way in which a request can fail: what happened, and what to do. */

import { t } from "./i18n.js";
import { plainLine } from "./records.js";

/** @param {import("./api.js").ApiError} error */
export function sentence(error) {
  const message = plainLine(error.message).slice(0, 400);
  switch (error.kind) {
    case "offline":
    case "key":
    case "lost":
      return t(`error.${error.kind}`);
    case "model":
      return t("error.model");
    case "limit":
      return t("error.limit", { message });
    case "busy":
      return t(message.includes("shutting down") ? "error.draining" : "error.busy", { message });
    case "large":
      return t("error.large", { message });
    case "forbidden":
      return t("error.forbidden", { message });
    case "failed":
      return t("error.failed", { message });
    default:
      return t("error.refused", { message });
  }
}
