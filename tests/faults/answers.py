"""A client's request and what came of it, however it ended."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx
from cells import Style
from cluster import PLAIN, Cluster, events, fresh_salt, prompt

CLIENT_TIMEOUT_S = 60.0


@dataclass
class Answer:
    """By choice its text, tokens, log probabilities and finish reason. `error`: the code of an error that was
    told; `broke`: the connection ended early. `done`: the answer says that it is complete."""

    request_id: str
    sent_at: float
    ended_at: float = 0.0
    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    status: int = 0
    error: str = ""
    broke: bool = False
    done: bool = False

    @property
    def content(self) -> tuple[Any, ...]:
        """What must not depend on how it came about."""
        counts = [self.usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        return self.text, self.ids, self.logprobs, self.finish, counts

    def take(self, event: dict[str, Any]) -> None:
        """A chunk of a stream, or a whole answer."""
        self.done = self.done or "done" in event
        self.usage = event.get("usage") or self.usage
        self.error = event.get("error", {}).get("code", self.error)
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            scored = (choice.get("logprobs") or {}).get("token_logprobs")
            self.logprobs.setdefault(index, []).extend(scored or ())
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]


def ask(
    cluster: Cluster, name: str, style: Style, plan: str = "auto", request_id: str = "", **more: Any
) -> Answer:
    """Send GOLD's prompt of that name, with a salt of its own, and read to the end; raises nothing that a
    server can cause."""
    answer = Answer(request_id or uuid.uuid4().hex, time.monotonic())
    body = cluster.body(prompt(name), n=style.n, **{"cache_salt": fresh_salt()} | more)
    headers = {"X-Baton-Plan": plan, "X-Request-Id": answer.request_id}
    if style.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.Client(timeout=CLIENT_TIMEOUT_S, verify=PLAIN, headers=headers) as client:
            _read(client, f"{cluster.url}/v1/completions", body, answer)
    except httpx.TransportError:
        answer.broke = True
    answer.ended_at = time.monotonic()
    return answer


def _read(client: httpx.Client, url: str, body: dict[str, Any], answer: Answer) -> None:
    with client.stream("POST", url, json=body) as reply:
        answer.status = reply.status_code
        if reply.headers["content-type"].startswith("text/event-stream"):
            for event in events(reply.iter_lines()):
                answer.take(event)
        else:
            reply.read()
            answer.take(reply.json())
            answer.done = reply.status_code == 200
