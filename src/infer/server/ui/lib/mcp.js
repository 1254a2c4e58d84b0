/** `mcp`: the tools of the MCP servers that the operator allows. The server of this page asks them; keys never come here. */

import { ApiError, askJson } from "./api.js";
import { learn } from "./i18n.js";
import { plainLine } from "./records.js";
import { parsed } from "./request.js";
import en from "../lang/mcp_en.js";
import zh from "../lang/mcp_zh.js";

/** @typedef {import("./records.js").Conversation} Conversation */
/** @typedef {import("./records.js").Message} Message */
/** @typedef {{name: string, description: string, parameters: any}} Tool */
/** @typedef {{name: string, tools: Tool[], left_out: Array<{name: string, reason: string}>, error: string | null}} McpServer */

learn({ en, zh });
/** Most rounds of calls for one message whose results go back by themselves. */
export const MAX_ROUNDS = 20;

/** The name by which a model calls a tool of a server. @param {string} server @param {string} tool */
export function calledAs(server, tool) {
  return `${server}__${tool}`.replace(/[^\w-]+/g, "_").slice(0, 64);
}

/** How many answers up to this one have called since the reader's last message. @param {Message[]} path */
export function roundsOf(path) {
  const last = path.findLastIndex((each) => each.role === "user");
  return path.slice(last + 1).filter((each) => each.toolCalls?.length).length;
}

class Mcp extends EventTarget {
  constructor() {
    super();
    /** @type {McpServer[]} */
    this.servers = [];
    this.isKnown = false;
    /** @type {Promise<void> | null} */
    this._asking = null;
  }

  /** Ask for the tools. */
  load() {
    this._asking ??= this._load().finally(() => { this._asking = null; });
    return this._asking;
  }

  async _load() {
    try {
      this.servers = (await askJson("/v1/mcp/servers")).data;
      this.isKnown = true;
    } catch {
      // It is asked again when the settings are opened, or a call is shown.
    }
    this.dispatchEvent(new Event("change"));
  }

  /** The tool of a call; undefined where it is none of these. @param {string} name */
  find(name) {
    for (const server of this.servers) {
      const tool = server.tools.find((each) => calledAs(server.name, each.name) === name);
      if (tool) return { server: server.name, tool: tool.name };
    }
    return undefined;
  }

  /** Whether a conversation has a tool. @param {Conversation} conversation @param {string} name */
  has(conversation, name) {
    const tools = parsed(conversation.tools);
    return Array.isArray(tools) && tools.some((each) => each?.function?.name === name);
  }

  /** Give a conversation a tool, or take it away.
   * @param {Conversation} conversation @param {McpServer} server @param {Tool} tool @param {boolean} isOn */
  set(conversation, server, tool, isOn) {
    const name = calledAs(server.name, tool.name);
    const tools = conversation.tools.trim() ? parsed(conversation.tools) : [];
    if (!Array.isArray(tools)) return;
    const kept = tools.filter((each) => each?.function?.name !== name);
    if (isOn) kept.push({ type: "function", function: { name, description: tool.description, parameters: tool.parameters } });
    if (conversation.toolChoice === name) conversation.toolChoice = "auto";
    conversation.tools = kept.length ? JSON.stringify(kept, null, 1) : "";
  }

  /** Call a tool; throws `ApiError`. @param {{server: string, tool: string}} what @param {string} text of the arguments
   * @param {AbortSignal} signal @returns {Promise<string>} */
  async call(what, text, signal) {
    const found = await askJson("/v1/mcp/call", { body: { ...what, arguments: parsed(text) }, signal });
    return found.is_error ? `Error: ${found.content}` : String(found.content);
  }
}

export const mcp = new Mcp();

/** @param {unknown} error what `call` has thrown */
export function saidBy(error) {
  return plainLine(error instanceof ApiError && error.message ? error.message : String(error));
}
