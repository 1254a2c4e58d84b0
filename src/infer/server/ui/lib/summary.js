/** A summary in place of what was said before. */

import { chatBody, modelOf, roomOf, streaming } from "./request.js";
import { learn, t } from "./i18n.js";
import en from "../lang/summary_en.js";
import zh from "../lang/summary_zh.js";

learn({ en, zh });
/** Share of the context that a summary may have. */
const SHARE = 0.2;

/** Begin a branch with a summary of a conversation.
 * @param {import("./answering.js").Answering} chats @param {import("./records.js").Tree} tree */
export async function summarise(chats, tree) {
  const { conversation } = tree;
  const path = tree.path();
  chats.errors.delete(conversation.id);
  const before = { ...conversation.chosen };
  const room = roomOf(modelOf(conversation)) ?? 2048;
  const asked = { ...path[0], content: t("summary.asked"), files: undefined };
  const body = {
    ...chatBody({ ...conversation, tools: "", schema: "", forgets: true }, [...path, asked]), ...streaming(true),
    max_tokens: Math.floor(SHARE * room),
  };
  const question = chats._new(tree, null, "user", { content: t("summary.before") });
  const message = chats._new(tree, question.id, "assistant", {});
  await chats._run(tree, [message], "/v1/chat/completions", body, {
    before: [question], undo: () => { tree.remove(question); conversation.chosen = before; },
  });
}
