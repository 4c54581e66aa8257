"""What becomes of requests."""

from __future__ import annotations

from core import metric_names as m
from deploy.observability.panels import Dashboard, Panel, Row
from deploy.observability.queries import quantile, rate

REQUESTS = Dashboard(
    "baton-requests",
    "Baton: requests",
    "What is asked, how it is planned and let in, and whether the plans told the truth.",
    [
        Row(
            "Traffic",
            [
                Panel(
                    "Requests by route",
                    "reqps",
                    "Answered, whatever the status.",
                    [("{{route}}", rate(m.REQUESTS, by="route"))],
                ),
                Panel("By status", "reqps", "All routes.", [("{{status}}", rate(m.REQUESTS, by="status"))]),
                Panel(
                    "Choices finished",
                    "reqps",
                    "By reason; and clients that left before their answer's end.",
                    [("{{reason}}", rate(m.FINISHED, by="reason")), ("client gone", rate(m.CLIENT_GONE))],
                ),
                Panel(
                    "Tokens",
                    "short",
                    "Each second.",
                    [("prompts", rate(m.PROMPT_TOKENS)), ("answers", rate(m.GENERATION_TOKENS))],
                ),
                Panel(
                    "Tokens by key",
                    "short",
                    "Prompts and answers, each second.",
                    [("{{key}}", rate(m.KEY_TOKENS, by="key"))],
                ),
                Panel(
                    "Engine steps",
                    "short",
                    "Each second, by pool.",
                    [("{{role}}", rate(m.STEPS, by="role"))],
                ),
            ],
        ),
        Row(
            "Admission",
            [
                Panel(
                    "Decisions",
                    "reqps",
                    "Let in, or told no and why.",
                    [("{{decision}}", rate(m.ADMISSIONS, by="decision"))],
                ),
                Panel(
                    "Told no, by key",
                    "reqps",
                    "Requests that were not let in.",
                    [
                        (
                            "{{key}} {{decision}}",
                            rate(m.ADMISSIONS, 'decision!~"admitted.*"', by="key, decision"),
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Plans",
            [
                Panel(
                    "Plans by kind",
                    "reqps",
                    "Apart or at one worker.",
                    [("{{plan}}", rate(m.PLANS, by="plan"))],
                ),
                Panel(
                    "Plans by reason",
                    "reqps",
                    "docs/api.md says what each reason means.",
                    [("{{reason}}", rate(m.PLANS, by="reason"))],
                ),
                Panel(
                    "Error of the predicted first token, median",
                    "percentunit",
                    "|predicted - real| / real, by kind of plan.",
                    [("{{plan}}", quantile(0.5, m.TTFT_ESTIMATE_ERROR, by="plan"))],
                ),
                Panel(
                    "Bias of the predicted first token",
                    "s",
                    "By which first tokens came sooner (over) or later (under) than said, each second.",
                    [("{{plan}} {{direction}}", rate(m.TTFT_ESTIMATE_BIAS, by="plan, direction"))],
                ),
            ],
        ),
        Row(
            "The cluster's edges",
            [
                Panel(
                    "Calls without the cluster token",
                    "short",
                    "Refused, each minute, by worker.",
                    [("{{worker}}", f"60 * {rate(m.CALLS_REFUSED, by='worker')}")],
                ),
                Panel(
                    "Announcements that nobody took",
                    "short",
                    "Each minute, by worker: its register cannot be reached.",
                    [("{{worker}}", f"60 * {rate(m.ANNOUNCEMENTS_FAILED, by='worker')}")],
                ),
            ],
        ),
    ],
)
