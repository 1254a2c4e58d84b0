"""The rows of the reliability scorecard: the tests of each, and the code whose promise it holds."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

HERE = "tests/reliability"

# What rows guard, below src/infer: a file, a folder with all that is in it, or, with a slash at its
# end, the files of a folder without those of its folders.
CORE = ("engine/", "engine/client", "schedule", "requests", "types")
"""Sequences, steps and pages."""
PAGED = ("runner", "attention")
"""What is kept in pages, and what reads it."""
MODEL = (*PAGED, "models/", "kernels", "csrc")
"""All that decides the bits of a token."""
REPLICAS = ("replicas", "child_process.py", "signals.py")
"""Processes of engines, their deaths and their streams."""
FRONT = ("server/", "server/http", "server/openai")
"""What lies between a socket and an engine."""
KEYS = ("server/tenancy", "fair_queue.py")
"""Limits and shares of keys."""
FRONTS = ("server/front_exchange.py", "server/front_identity.py", "server/front_places.py")
"""What several fronts tell each other."""
CLUSTER = ("cluster",)
TEXT = ("text/", "text/tools")
UNTRUSTED = (
    "text/untrusted",
    "text/grammars",
    "runner/compiling_threads.py",
    "runner/grammar_masks.py",
)
"""Grammars and templates of strangers, from the check to the masks."""
MEMORY = ("engine/memory_keeper.py", "engine/build", "main_memory.py", "memory_pressure.py")
"""What is promised, kept and given back."""
THREADS = (
    "csrc/threads.cpp",
    "csrc/waiting.cpp",
    "csrc/governor.h",
    "kernels/team.py",
    "runner/step_thread.py",
    "threads.py",
)
START = ("server/early_listener.py", "server/early_stream.py", "server/serve.py", "load_stages.py")
VIEWERS = ("server/observe", "server/viewers.py", "requests")
FILES = ("models/", "text/", "files.py", "private_files.py", "readable_text.py")
"""What strangers' files go through."""
DRAWS = ("runner/sampler.py", "runner/vocab_blocks.py", "csrc/draw.cpp", "csrc/draw_row.h")
"""What the numbers of a request reach."""
FUZZED = (*FRONT, *KEYS, *TEXT, *UNTRUSTED, *FILES, *DRAWS, "server/sessions")
"""What the fuzzer's input reaches."""


@dataclass(frozen=True)
class Row:
    """A row of the scorecard; `load` describes its load if the tests' findings do not."""

    number: str
    name: str
    tests: tuple[str, ...]
    load: str = ""
    _: KW_ONLY
    guards: tuple[str, ...]
    """The code whose promise it holds; a row that is older than this code is stale."""
    needs: str = ""
    """A module without which the row is left out."""
    engines: str = "one_engine"
    """Which variants run of the tests that have some; see `tests/support/engines.py`."""

    @property
    def keywords(self) -> str:
        """The choice of its tests as pytest's `-k` has it."""
        return "not two_engines" if self.engines == "one_engine" else self.engines


ROWS = (
    Row(
        "1",
        "counts under load",
        (f"{HERE}/test_overload.py::test_every_request_is_counted_for_longer",),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "2",
        "batch independence",
        (
            f"{HERE}/test_exactness.py::test_a_thousand_needles_in_batches_of_every_size",
            "tests/schedule/test_workloads.py::test_every_request_has_the_tokens_that_it_has_alone",
            "tests/engine/test_lattice.py",
        ),
        guards=CORE + MODEL,
    ),
    Row(
        "3",
        "forced preemption",
        (f"{HERE}/test_exactness.py::test_preemption_at_every_third_step_for_longer",),
        guards=CORE,
    ),
    Row(
        "4",
        "prefix cache on, off, evicting",
        (f"{HERE}/test_exactness.py::test_ten_thousand_shared_prefixes",),
        guards=CORE,
    ),
    Row(
        "5",
        "poisoned pages",
        (
            "tests/engine/test_containment.py::test_taken_pages_are_poisoned_and_nobody_notices",
            "tests/engine/test_containment.py::test_a_cell_too_many_is_noticed",
            "tests/engine/test_containment.py::test_poison_on_the_real_model",
        ),
        "20,000 pages taken from a pool of 59, preemption at each 7th step; and the real model with"
        " both attention backends. No other row outlives a sequence",
        guards=CORE + PAGED,
    ),
    Row(
        "6",
        "stateful and exhaustive model",
        (
            f"{HERE}/test_exactness.py::test_every_interleaving_of_more",
            "tests/schedule/test_stateful.py",
        ),
        guards=CORE,
    ),
    Row(
        "7",
        "deterministic simulation",
        (f"{HERE}/test_simulation.py::test_ten_thousand_simulations",),
        "Arrivals, aborts, preemptions, failing steps, NaN and killed engines, all from a seed;"
        " each tenth seed runs twice. `INFER_SIMULATED_SEEDS` sets the number",
        guards=CORE,
    ),
    Row(
        "8",
        "cancel matrix",
        (f"{HERE}/test_ending.py::test_cancelling_at_every_moment_a_hundred_times",),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "9",
        "disconnect storm",
        (f"{HERE}/test_leaving_clients.py::test_a_storm",),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "10",
        "plain requests closed",
        (f"{HERE}/test_leaving_clients.py::test_plain_requests_that_are_closed",),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "11",
        "slow readers",
        (f"{HERE}/test_leaving_clients.py::test_slow_readers",),
        guards=FRONT,
    ),
    Row(
        "12",
        "slow senders",
        (f"{HERE}/test_leaving_clients.py::test_slowloris",),
        guards=FRONT,
    ),
    Row(
        "13",
        "bad network",
        (f"{HERE}/test_bad_network.py::test_a_bad_network_for_longer",),
        "A proxy in user space; the design's hour is `INFER_BAD_NETWORK_S=3600`",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "14",
        "SSE conformance",
        (
            "tests/server/test_streams.py",
            "tests/server/test_clients.py",
            "tests/text/test_text_stop.py",
            "tests/text/test_text_detokenizer.py",
        ),
        "stop strings, emoji and broken characters cut everywhere; OpenAI's client reads all",
        guards=FRONT + TEXT,
    ),
    Row(
        "15",
        "corpus of bad requests",
        (
            f"{HERE}/test_hostile_inputs.py",
            "tests/server/test_refused_fields.py",
            "tests/server/test_refused_bodies.py",
        ),
        "fixed bad fields, bodies, types, sizes and routes, on both endpoints; 4xx with OpenAI's"
        " error body, nothing of the inside in it, no step of the engine",
        guards=FRONT,
    ),
    Row(
        "16",
        "generated bodies",
        (f"{HERE}/test_hostile.py::test_more_generated_bodies",),
        guards=FRONT + TEXT,
    ),
    Row(
        "17",
        "byte fuzz",
        (f"{HERE}/test_byte_fuzz.py::test_mutated_bytes_for_longer",),
        "No run takes 1 s of CPU or 256 MB; the design's number is `INFER_FUZZ_EXECS=10000000`",
        guards=FRONT + TEXT,
    ),
    Row(
        "18",
        "size bombs",
        (f"{HERE}/test_hostile.py::test_size_bombs",),
        guards=FRONT + TEXT,
    ),
    Row(
        "19",
        "poison requests",
        (
            f"{HERE}/test_poison.py",
            "tests/engine/test_containment.py::test_of_thousands_exactly_the_poisonous_ones_fail",
        ),
        "Exactly those fail, with a typed error, the others are exact, the engine keeps its pid;"
        " also of 5,000 without HTTP, engine process, hash model",
        guards=CORE + REPLICAS,
    ),
    Row(
        "20",
        "10 x overload",
        (f"{HERE}/test_overload.py::test_ten_times_too_much",),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "21",
        "burst admission race",
        (f"{HERE}/test_overload.py::test_a_burst",),
        guards=FRONT + CORE,
    ),
    Row(
        "22",
        "noisy neighbour",
        (
            "tests/schedule/test_fair_share.py",
            "tests/server/test_tenants.py::test_limits",
            "tests/server/test_tenants.py::test_a_flood_beside_a_key_with_single_requests",
        ),
        "Hash model: bounds of what one key gets while another floods, and the limits of a key; the"
        " times to the first token are in the log, by `benchmarks/tenants.py`",
        guards=CORE + KEYS,
    ),
    Row(
        "23",
        "KV cache exhausted for ever",
        (f"{HERE}/test_overload.py::test_a_cache_that_is_too_small_for_ever",),
        guards=FRONT + CORE,
    ),
    Row(
        "24",
        "kill -9 of the engine",
        (f"{HERE}/test_kill.py::test_two_hundred_streams_and_twenty_kills",),
        guards=REPLICAS + CORE,
    ),
    Row(
        "25",
        "hung step, false alarms",
        ("tests/engine/test_watchdog.py",),
        "SIGSTOP and a step that never ends, limits of 0.5 and 1.8 s: stacks shown, replaced,"
        " streams go on; idle and saturated for longer than the limit: no restart",
        guards=REPLICAS,
    ),
    Row(
        "26",
        "device faults",
        (f"{HERE}/test_simulation.py::test_device_faults_for_longer",),
        "Only the request that a fault hits fails, or nobody; `INFER_SIMULATED_FAULTS` sets the"
        " number. On a GPU: not run",
        guards=CORE,
    ),
    Row(
        "27",
        "a replica is lost",
        ("tests/engine/fleet/test_replicas.py::test_a_hundred_rounds_of_three",),
        guards=REPLICAS + CORE,
    ),
    Row(
        "28",
        "SIGTERM and rolling restart",
        (
            f"{HERE}/test_ending.py::test_two_hundred_streams_at_sigterm",
            f"{HERE}/test_ending.py::test_one_server_after_the_other_twenty_times",
            "tests/server/test_limits.py::test_the_end_with_an_engine_process",
        ),
        guards=FRONT + REPLICAS + CORE,
    ),
    Row(
        "29",
        "poison pill",
        (
            "tests/engine/test_resume.py::test_a_poison_pill_is_found_and_the_others_are_exact",
            "tests/engine/test_resume.py::test_three_pills_at_once",
        ),
        "requests that end the engine by a segmentation fault, a hang, a kill; 8 to 12 beside them:"
        " given up after two crashes (kills: four), the others exact",
        guards=REPLICAS,
    ),
    Row(
        "30",
        "soak, shortened",
        (f"{HERE}/test_soak.py",),
        guards=FRONT + REPLICAS + CORE + PAGED,
    ),
    Row(
        "31",
        "unique-key churn",
        (f"{HERE}/test_unique_keys.py::test_unique_keys",),
        "The design's number is `INFER_UNIQUE_KEYS=1000000`; grammars are row A8",
        guards=FRONT + CORE,
    ),
    Row(
        "32",
        "route sweep",
        (
            f"{HERE}/test_hostile.py::test_every_route_and_no_other",
            "tests/server/test_tenants.py::test_every_route_needs_a_key",
            "tests/server/test_tenants.py::test_nothing_crosses_from_one_key_to_another",
        ),
        "Each route without a key, with wrong ones and with that of another",
        guards=FRONT + KEYS,
    ),
    Row(
        "33",
        "cross-tenant leak",
        (
            f"{HERE}/test_cross_tenant.py::test_two_tenants_for_longer",
            f"{HERE}/test_cross_tenant.py::test_times_for_longer",
        ),
        guards=CORE + KEYS,
    ),
    Row(
        "M1",
        "a limit of 1 GiB",
        (f"{HERE}/test_memory_limit.py",),
        "SmolLM2 in a control group, which needs one that may be made; what the kernel has ended is"
        " read from its counters",
        guards=MEMORY,
    ),
    Row(
        "N1",
        "noisy machine",
        (f"{HERE}/test_noisy_machine.py",),
        "A thread for each core; every stream is as it is alone. A quota needs a control group that"
        " may be made",
        guards=THREADS,
    ),
    Row(
        "C1",
        "limits of a key over four fronts",
        (
            "tests/server/test_front_limits.py::test_four_fronts_let_in_what_one_does",
            "tests/server/test_front_limits.py::test_without_the_authority_each_has_its_share",
            "tests/server/test_front_limits.py::test_no_failure_lets_in_more_for_longer",
        ),
        "600 requests and 60,000 tokens a minute, in virtual time: within 2 % of one front; with an"
        " authority dead, slow or cut off at any moment at most 1.25 times",
        guards=KEYS + FRONTS,
    ),
    Row(
        "A9",
        "logs, loads, databases",
        (f"{HERE}/test_attack_operations.py", "tests/server/test_database.py"),
        "A log that nobody reads (10,000 requests), stdout full, closed and missing, loads that"
        " hang at the start and beneath a client that waits, a database locked or read-only",
        guards=FRONT,
    ),
    Row(
        "A11",
        "the port while a model loads",
        (f"{HERE}/test_attack_start.py", "tests/server/test_early_listener.py"),
        "Four attackers (silent, slow, rubbish, oversized heads, clients that leave) and 1,000"
        " silent connections at the address of a server that loads, over TCP, TLS and a Unix"
        " socket; each probe is answered, and no connection is refused when the server comes",
        guards=START,
    ),
    Row(
        "A12",
        "templates and grammars of strangers",
        (f"{HERE}/test_attack_template.py",),
        guards=TEXT + UNTRUSTED,
    ),
    Row(
        "B1",
        "a script's end",
        ("tests/engine/test_exit.py",),
        "100 scripts that end right after their first tokens, the preparing of the cache slowed",
        guards=CORE + THREADS,
    ),
    Row(
        "B2",
        "older CPUs",
        (
            "tests/kernels/test_fusion.py::test_whole_numbers_are_exact_on_older_cpus",
            "tests/kernels/test_linear.py::test_bfloat16_is_not_packed_where_onednn_refuses_it",
            "tests/engine/test_plan.py::test_without_arithmetic_for_bfloat16_the_default_is_float32",
            "tests/engine/test_plan.py::test_whole_numbers_without_kernels_and_onednn_are_refused",
        ),
        "oneDNN held to SSE4.1, AVX2 and AVX-512 without VNNI; torch without oneDNN",
        guards=MODEL,
    ),
    Row(
        "B3",
        "silence of a restart",
        (f"{HERE}/test_kill.py::test_the_silence_of_ten_kills", "tests/engine/test_standby.py"),
        guards=REPLICAS,
    ),
    Row(
        "S1",
        "a simulated fleet",
        (f"{HERE}/test_simulated_fleet.py::test_a_hundred_engines_and_a_hundred_thousand_streams",),
        guards=REPLICAS + KEYS,
    ),
    Row(
        "A1",
        "no request ends the API process",
        (
            f"{HERE}/test_attack_grammar.py::test_chains_are_refused",
            f"{HERE}/test_attack_grammar.py::test_chains_are_refused_on_small_stacks",
            f"{HERE}/test_attack_grammar.py::test_ten_thousand_generated_grammars_leave_every_process",
            "tests/text/test_grammar_depth.py",
            "tests/text/test_grammar_checker.py",
        ),
        guards=UNTRUSTED,
    ),
    Row(
        "A2",
        "a request's failure is not the engine's",
        (
            f"{HERE}/test_attack_grammar.py::test_failing_requests_never_restart_the_engine",
            f"{HERE}/test_attack_grammar.py::test_large_grammars_work_or_are_refused",
            "tests/engine/test_containment.py",
        ),
        guards=UNTRUSTED,
    ),
    Row(
        "A8",
        "grammars by bytes and by time",
        (
            f"{HERE}/test_attack_grammar.py::test_a_thousand_unique_grammars",
            "tests/engine/test_grammar_waits.py",
        ),
        guards=UNTRUSTED,
    ),
    Row(
        "A3",
        "attack: the event loop",
        (
            f"{HERE}/test_attack_http.py::test_the_event_loop_is_there",
            f"{HERE}/test_attack_http.py::test_what_choices_share_is_spelled_once",
            f"{HERE}/test_attack_http.py::test_an_echo_is_decoded_once_a_prompt",
            f"{HERE}/test_attack_http.py::test_a_sessions_history_decides_where_the_work_is_done",
        ),
        guards=FRONT,
    ),
    Row(
        "A6",
        "attack: what a key can spend",
        (
            f"{HERE}/test_attack_http.py::test_a_greedy_key_beside_another",
            f"{HERE}/test_attack_http.py::test_all_that_costs_counts",
            f"{HERE}/test_attack_http.py::test_text_and_grammars_count_as_tokens",
            f"{HERE}/test_attack_http.py::test_what_one_request_may_use_is_bounded",
            f"{HERE}/test_attack_http.py::test_long_bodies_of_one_key_leave_places_to_others",
            f"{HERE}/test_attack_http.py::test_bodies_that_come_late_do_not_pass_the_queues_limit",
            f"{HERE}/test_attack_http.py::test_quotas_of_sessions",
            f"{HERE}/test_attack_http.py::test_files_are_their_owners_alone",
        ),
        guards=FRONT + KEYS,
    ),
    Row(
        "A4",
        "what is refused costs nothing more",
        (
            f"{HERE}/test_attack_bodies.py::test_an_error_before_the_whole_body_ends_the_connection",
            f"{HERE}/test_attack_bodies.py::test_framing_longer_than_the_body",
            f"{HERE}/test_attack_bodies.py::test_refusals_of_the_protocol_are_counted_and_logged",
            f"{HERE}/test_attack_bodies.py::test_the_budget_of_bodies",
            f"{HERE}/test_attack_bodies.py::test_chunk_floods_without_a_key",
            f"{HERE}/test_attack_bodies.py::test_a_thousand_bodies_that_never_end",
        ),
        guards=FRONT,
    ),
    Row(
        "A5",
        "connections",
        (
            f"{HERE}/test_attack_connections.py::test_what_is_accepted_does_not_wait_for_acknowledgements",
            f"{HERE}/test_attack_connections.py::test_who_gives_way",
            f"{HERE}/test_attack_connections.py::test_places_fit_into_the_descriptors",
            f"{HERE}/test_attack_connections.py::test_two_thousand_idle_connections",
            f"{HERE}/test_attack_connections.py::test_a_kept_connection",
            f"{HERE}/test_attack_bodies.py::test_a_client_that_closes_its_side_gets_its_answer",
            "tests/server/test_limits.py::test_too_many_connections",
        ),
        guards=FRONT,
    ),
    Row(
        "R1",
        "two engines: bad requests",
        (f"{HERE}/test_hostile_inputs.py",),
        "the list of row 15 against two engines; no step of either",
        engines="two_engines",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "R2",
        "two engines: disconnect storm",
        (f"{HERE}/test_leaving_clients.py::test_a_storm",),
        engines="two_engines",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "R3",
        "two engines: slow readers",
        (f"{HERE}/test_leaving_clients.py::test_slow_readers",),
        engines="two_engines",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "R4",
        "two engines: noisy neighbour",
        (
            "tests/server/test_tenants.py::test_limits",
            "tests/server/test_tenants.py::test_a_flood_beside_a_key_with_single_requests",
        ),
        "The limits of a key, and what a key waits for while another floods both engines",
        engines="two_engines",
        guards=KEYS + REPLICAS,
    ),
    Row(
        "R5",
        "two engines: route sweep",
        (
            f"{HERE}/test_hostile.py::test_every_route_and_no_other",
            "tests/server/test_tenants.py::test_every_route_needs_a_key",
            "tests/server/test_tenants.py::test_nothing_crosses_from_one_key_to_another",
        ),
        "Each route without a key, with wrong ones and with that of another",
        engines="two_engines",
        guards=FRONT + KEYS,
    ),
    Row(
        "V1",
        "viewers of an engine",
        ("tests/server/test_engine_events.py", "tests/server/test_replica_events.py"),
        "10,000 steps a second, slow viewers, the ninth viewer, two keys, a killed engine, one of"
        " two killed",
        guards=VIEWERS,
    ),
    Row(
        "O1",
        "operated under load, HAProxy",
        (f"{HERE}/test_operated_under_load.py::test_operated_under_load[haproxy]",),
        "Streams by OpenAI's library and whole answers by requests, behind the block of"
        " docs/proxies.md with TLS to the servers; `INFER_OPERATED_SEED` draws what is done when",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "O2",
        "operated under load, nginx",
        (f"{HERE}/test_operated_under_load.py::test_operated_under_load[nginx]",),
        "As O1",
        guards=FRONT + REPLICAS,
    ),
    Row(
        "C2",
        "deaths in a cluster",
        ("tests/cluster/test_ray.py",),
        "In an environment with Ray; `INFER_CLUSTER_ROUNDS` sets the rounds of each kind",
        needs="ray",
        guards=CLUSTER + REPLICAS,
    ),
    Row(
        "C3",
        "several fronts on Ray",
        ("tests/cluster/test_fronts_on_ray.py",),
        "In an environment with Ray: limits of a key, questions and deaths of what fronts share,"
        " sessions in PostgreSQL",
        needs="ray",
        guards=CLUSTER + FRONTS,
    ),
    Row(
        "C4",
        "hostile clients of a cluster",
        ("tests/cluster/test_hostile_on_ray.py",),
        "In an environment with Ray: bad requests, a storm, slow readers, a flood, routes without"
        " a key",
        needs="ray",
        guards=CLUSTER + FRONT,
    ),
    Row(
        "A7",
        "Host and Origin",
        (
            f"{HERE}/test_hostile.py::test_every_route_and_no_other",
            f"{HERE}/test_attack_pages.py::test_origins",
            f"{HERE}/test_attack_pages.py::test_hosts_where_there_are_keys_or_others_may_come",
            f"{HERE}/test_attack_pages.py::test_what_pages_may_send_and_see",
        ),
        guards=FRONT,
    ),
    Row(
        "A10",
        "hostile checkpoints and operators",
        (
            f"{HERE}/test_attack_files.py",
            "tests/text/test_text_chat.py::test_what_a_normaliser_makes_of_text_is_no_control_token",
            "tests/server/test_keys.py",
            "tests/server/test_transport.py",
            "tests/cli/test_plain.py",
        ),
        "170 files: each is a `LoadError` in less than 5 s of CPU and 1 GiB; 20 keys made and 20"
        " revoked at once; a revoked key's stream ends within 1 s; markup and escape sequences in"
        " all that the terminal shows",
        guards=FILES + KEYS,
    ),
)
