/** Chinese texts of summaries, which are loaded with them. */
export default {
  "summary.asked": "请用几句话总结我们到目前为止的对话，保留后续需要的事实、名称和数字。",
  "summary.before": "我们到目前为止谈了什么？",
};
