/** English texts of tools of MCP servers, which are loaded with them. */
export default {
  "mcp.ask": "May {tool} of {server} run with these arguments?",
  "mcp.decline": "Do not run",
  "mcp.declined": "The user has not allowed this call.",
  "mcp.hint": "Each call is shown, and runs only if you say so. Its result goes back to the model.",
  "mcp.left-out": "{name} cannot be used: {reason}",
  "mcp.rounds": "After {n} rounds results no longer go back by themselves.",
  "mcp.run": "Run",
  "mcp.runs": "{tool} of {server} is running",
  "mcp.stop": "Stop",
  "mcp.tools-of": "Tools of {server}",
};
