"""Names and buckets of every metric, in one place: dashboards and scalers hold on to them.

Labels are `role`, `worker`, `model_name`, the operator's names of API keys and short fixed lists; never
anything a client chose.
`VLLM_ALIASES` maps vLLM's core names to ours, exported under both.
"""

from __future__ import annotations

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)

ESTIMATE_ERROR_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2)
"""Of |predicted - real| / real."""

SLO_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
"""Of what was measured / its target."""

# router
REQUESTS = "baton_requests_total"  # route, status
REQUESTS_IN_FLIGHT = "baton_requests_in_flight"
REQUESTS_QUEUED = "baton_requests_queued"
ROUTER_QUEUE_SECONDS = "baton_router_queue_time_seconds"
ADMISSIONS = "baton_admissions_total"  # key, decision
KEY_TOKENS = "baton_key_tokens_total"  # key
PLANS = "baton_plans_total"  # plan, reason
TTFT = "baton_time_to_first_token_seconds"
ITL = "baton_inter_token_latency_seconds"
E2E = "baton_e2e_request_latency_seconds"
PROMPT_TOKENS = "baton_prompt_tokens_total"
GENERATION_TOKENS = "baton_generation_tokens_total"
FINISHED = "baton_finished_choices_total"  # reason
CLIENT_GONE = "baton_client_disconnects_total"
WORKERS = "baton_workers"  # role, state
WORKER_CONNECTIONS_LOST = "baton_worker_connections_lost_total"
FAULTS = "baton_faults_total"  # where
RESUMES = "baton_resumes_total"  # reason: planning.recovery.Cause
RESUMES_DENIED = "baton_resumes_denied_total"  # why: planning.recovery.Denial
POISONED = "baton_poisoned_total"
SLO_REQUESTS = "baton_slo_requests_total"  # target: ttft, itl, all; result: met, missed, failed
SLO_RATIO = "baton_slo_ratio"  # target: ttft, itl
NO_SLO_REQUESTS = "baton_requests_without_slo_total"
TTFT_ESTIMATE_ERROR = "baton_ttft_estimate_error_ratio"  # plan
TTFT_ESTIMATE_BIAS = "baton_ttft_estimate_bias_seconds_total"  # plan, direction: over, under

# worker
RUNNING = "baton_num_requests_running"
WAITING = "baton_num_requests_waiting"
LOADING = "baton_num_requests_loading"
HELD = "baton_num_requests_held"
PREFILL_BACKLOG = "baton_prefill_backlog_seconds"
BLOCKS_TOTAL = "baton_kv_blocks_total"
BLOCKS_FREE = "baton_kv_blocks_free"
BLOCKS_CACHED = "baton_kv_blocks_cached"
BLOCKS_QUARANTINED = "baton_kv_blocks_quarantined"
BLOCKS_EVICTED = "baton_kv_blocks_evicted_total"
KV_USAGE = "baton_kv_cache_usage_perc"
PREFIX_QUERIES = "baton_prefix_cache_queries_total"
PREFIX_HITS = "baton_prefix_cache_hits_total"
PREEMPTIONS = "baton_num_preemptions_total"
STEPS = "baton_engine_steps_total"
TOKENS_BY_SOURCE = "baton_prompt_tokens_by_source_total"  # source
QUEUE_SECONDS = "baton_request_queue_time_seconds"
PREFILL_SECONDS = "baton_request_prefill_time_seconds"
TIER_QUERIES = "baton_tier_queried_blocks_total"  # tier
TIER_HITS = "baton_tier_hit_blocks_total"  # tier
TIER_LOAD_BYTES = "baton_tier_load_bytes_total"  # tier
TIER_LOAD_SECONDS = "baton_tier_load_seconds_total"  # tier
TIER_STORE_BYTES = "baton_tier_store_bytes_total"  # tier
TIER_STORE_SECONDS = "baton_tier_store_seconds_total"  # tier
TIER_EVICTED = "baton_tier_evicted_blocks_total"  # tier
TIER_CORRUPT = "baton_tier_corrupt_blocks_total"  # tier
TIER_DROPPED = "baton_tier_dropped_stores_total"  # tier
TIER_ERRORS = "baton_tier_errors_total"  # tier
TIER_USED_BYTES = "baton_tier_used_bytes"  # tier
TIER_CAPACITY_BYTES = "baton_tier_capacity_bytes"  # tier
TIER_BREAKER_OPEN = "baton_tier_breaker_open"  # tier; 1 = open, 0.5 = half-open
LOADS = "baton_kv_loads_total"  # sources
TRANSFER_SECONDS = "baton_kv_transfer_seconds"
TRANSFER_BYTES = "baton_kv_transfer_bytes_total"
TRANSFER_FAILURES = "baton_kv_transfer_failures_total"  # reason
LEASES_EXPIRED = "baton_kv_leases_expired_total"
ANNOUNCEMENTS_FAILED = "baton_announcements_failed_total"
CALLS_REFUSED = "baton_refused_calls_total"

VLLM_ALIASES = {
    "vllm:num_requests_running": RUNNING,
    "vllm:num_requests_waiting": WAITING,
    "vllm:kv_cache_usage_perc": KV_USAGE,
    "vllm:prefix_cache_queries_total": PREFIX_QUERIES,
    "vllm:prefix_cache_hits_total": PREFIX_HITS,
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": ITL,
    "vllm:e2e_request_latency_seconds": E2E,
    "vllm:request_queue_time_seconds": QUEUE_SECONDS,
    "vllm:request_prefill_time_seconds": PREFILL_SECONDS,
    "vllm:prompt_tokens_total": PROMPT_TOKENS,
    "vllm:prompt_tokens_by_source_total": TOKENS_BY_SOURCE,
    "vllm:generation_tokens_total": GENERATION_TOKENS,
    "vllm:num_preemptions_total": PREEMPTIONS,
    "vllm:nixl_xfer_time_seconds": TRANSFER_SECONDS,
    "vllm:nixl_bytes_transferred": TRANSFER_BYTES,
    "vllm:nixl_num_failed_transfers": TRANSFER_FAILURES,
}
