/** English texts of summaries, which are loaded with them. */
export default {
  "summary.asked": "Summarise our conversation so far in a few sentences, with all facts, names and numbers that matter for what comes next.",
  "summary.before": "What have we talked about so far?",
};
