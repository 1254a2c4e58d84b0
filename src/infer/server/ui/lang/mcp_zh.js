/** Chinese texts of tools of MCP servers, which are loaded with them. */
export default {
  "mcp.ask": "允许 {server} 的 {tool} 以这些参数运行吗？",
  "mcp.decline": "不运行",
  "mcp.declined": "用户没有允许这次调用。",
  "mcp.hint": "每次调用都会显示，只有您同意才会运行。结果会返回给模型。",
  "mcp.left-out": "{name} 不能使用：{reason}",
  "mcp.rounds": "{n} 轮之后，结果不再自动返回。",
  "mcp.run": "运行",
  "mcp.runs": "{server} 的 {tool} 正在运行",
  "mcp.stop": "停止",
  "mcp.tools-of": "{server} 的工具",
};
