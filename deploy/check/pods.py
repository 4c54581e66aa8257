"""Pods as rendered manifests describe them, whichever kind of object makes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
"""One object, as YAML has it."""


@dataclass(frozen=True, slots=True)
class Pod:
    """`owner`: Kind/name, of a set with the role behind it. `selector`: None where the kind has none.
    `strategy`: of a roll-out, with maxSurge and maxUnavailable."""

    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]
    selector: dict[str, str] | None
    strategy: dict[str, Any]

    @property
    def role(self) -> str:
        """router, prefill, decode or redis."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def containers(self) -> list[dict[str, Any]]:
        return self.spec.get("containers", [])

    def ports(self) -> dict[str, int]:
        """Name -> number, of all containers."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
        }


def pods(documents: Iterable[Document]) -> list[Pod]:
    """One for each template."""
    return [pod for document in documents for pod in _pods(document)]


def _pods(document: Document) -> Iterator[Pod]:
    kind, spec = document["kind"], document.get("spec", {})
    owner = f"{kind}/{document['metadata']['name']}"
    if kind in ("Deployment", "StatefulSet"):
        template, strategy = spec["template"], spec.get("strategy", {}).get("rollingUpdate", {})
        yield Pod(
            owner,
            template["metadata"].get("labels", {}),
            template["spec"],
            spec["selector"]["matchLabels"],
            strategy,
        )
    elif kind == "DisaggregatedSet":
        for role in spec["roles"]:
            template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            strategy = role["spec"].get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
            yield Pod(
                f"{owner}/{role['name']}",
                template["metadata"].get("labels", {}),
                template["spec"],
                None,
                strategy,
            )


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """An empty selector selects nothing here: in none of our objects is that meant."""
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def of_kind(documents: Iterable[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def name_of(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as a kubelet does: what is not known stays as it is."""
    return _REFERENCE.sub(lambda found: variables.get(found[1], found[0]), text)


def references(text: str) -> list[str]:
    """The names in `$(NAME)`."""
    return _REFERENCE.findall(text)
