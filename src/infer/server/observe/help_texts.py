"""`help_of`: what each metric is, for the line `# HELP`"""

from __future__ import annotations

_WAITS = "Milliseconds from the hand-over of a request to the engine until its first seat"
_TEXTS = {
    "num_requests_running": "Requests that have a seat and pages now.",
    "num_requests_waiting": "Requests that wait for a seat now.",
    "num_requests_preempted": "Requests that have lost their pages and will be recomputed.",
    "kv_cache_usage_perc": "Part of the pages of the KV cache that requests use now; 0 to 1.",
    "cores_taken": "Cores that other processes had in the last seconds while kernels needed them.",
    "prompt_tokens": "Tokens of prompts that were taken on.",
    "prompt_tokens_cached": "Tokens of prompts that were found in the prefix cache.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in the prefix cache.",
    "generation_tokens": "Tokens that were sampled.",
    "num_preemptions": "Times that a sequence has lost its pages to others.",
    "spec_decode_num_drafts": "Speculation: proposals that were verified.",
    "spec_decode_num_draft_tokens": "Speculation: tokens that were proposed.",
    "spec_decode_num_accepted_tokens": "Speculation: proposed tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Speculation: accepted tokens by their place in the"
    " proposal.",
    "engine_steps": "Steps of the engine.",
    "engine_restarts": "Engines that have died and were replaced.",
    "requests_moved": "Requests that went on in another engine.",
    "requests_moved_unequal": "Requests that went on in an engine which computes other bits.",
    "ready": "1 if the engine takes requests now, else 0.",
    "request_success": "Requests that have ended, by the reason of their end.",
    "admission_rejections": "Requests that were refused, by HTTP status.",
    "key_requests": "Requests of a key; keys that use little are together.",
    "key_prompt_tokens": "Tokens of a key's prompts; keys that use little are together.",
    "key_cached_tokens": "Those of them that were cached; keys that use little are together.",
    "key_generation_tokens": "Tokens sampled for a key; keys that use little are together.",
    "time_to_first_token_seconds": "Seconds from the request to its first token.",
    "request_queue_time_seconds": "Seconds from the request to its first seat.",
    "request_prefill_time_seconds": "Seconds from the first seat to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the end.",
    "request_inference_time_seconds": "Seconds from the first seat to the end.",
    "e2e_request_latency_seconds": "Seconds from the request to its end.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens sampled for a request, of all its choices.",
    "request_params_max_tokens": "Most tokens that a request has asked for.",
    "request_params_n": "Choices of a request.",
    "request_num_preemptions": "Times that a request has lost its pages.",
    "inter_token_latency_seconds": "Seconds between two tokens of a stream.",
    "request_time_per_output_token_seconds": "Seconds from the first token to the end, for each"
    " further token of a request.",
    "iteration_tokens_total": "Tokens that a step has computed.",
    "cache_config_info": "Always 1; the labels say how large the KV cache is, in pages.",
    "engine_mode": "Always 1; the label is the batching mode.",
    "batches_formed": "Static mode: batches that have begun.",
    "batches_per_minute": "Static mode: batches that have begun in the last minute.",
    "mean_batch_size": "Static mode: requests of a batch, on average since the start.",
    "mean_rows_per_step": "Sequences that a step has computed, on average since the start.",
    "mean_wait_ms": f"{_WAITS}, on average.",
    "p50_wait_ms": f"{_WAITS}, half of them, within 5 %.",
    "p95_wait_ms": f"{_WAITS}, 95 of 100, within 5 %.",
    "p99_wait_ms": f"{_WAITS}, 99 of 100, within 5 %.",
    "success_rate": "Part of requests that have ended normally, of these and those that failed.",
    "mean_processing_ms": "Milliseconds from the first seat to a normal end, on average.",
    "kv_bytes": "Size in bytes that the KV cache may have.",
    "kv_bytes_touched": "Bytes of main memory that the KV cache takes now.",
    "kv_bytes_allowed": "Bytes that the KV cache may take now; less while memory is scarce.",
    "kv_pages_used": "Pages of the KV cache that requests use now.",
    "prefix_hit_rate": "Part of the tokens of prompts that were found in the prefix cache.",
}


def help_of(name: str) -> str:
    """The text of a metric, by its name without prefix; for a replica's, that of all."""
    if name.startswith("replica_"):
        return f"Of one replica: {_TEXTS[name.removeprefix('replica_')]}"
    return _TEXTS[name]
