"""What connects objects: selectors, ports, budgets, scalers, discovery."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from core.errors import ConfigError
from deploy.check.pods import Document, Pod, name_of, of_kind, pods, selects
from deploy.check.process import effective_settings

SERVING = ("router", "prefill", "decode")


def link_problems(documents: list[Document]) -> Iterator[str]:
    """All rules that look at several objects."""
    there = pods(documents)
    for rule in (_selectors, _budgets, _discovery):
        yield from rule(there, documents)
    for service in of_kind(documents, "Service"):
        yield from _service(service, there)
    for policy in of_kind(documents, "NetworkPolicy"):
        yield from _policy(policy, there)
    for monitor in of_kind(documents, "PodMonitor", "ServiceMonitor"):
        yield from _monitor(monitor, there, documents)
    for scaler in of_kind(documents, "ScaledObject", "HorizontalPodAutoscaler"):
        yield from _scaler(scaler, documents)


def _selectors(there: list[Pod], documents: list[Document]) -> Iterator[str]:
    for pod in there:
        if pod.selector is not None and not selects(pod.selector, pod.labels):
            yield f"{pod.owner}: its selector does not match its pods' labels"
        if pod.selector is not None:
            for other in there:
                if other is not pod and selects(pod.selector, other.labels):
                    yield f"{pod.owner}: its selector matches the pods of {other.owner} too"


def _budgets(there: list[Pod], documents: list[Document]) -> Iterator[str]:
    budgets = of_kind(documents, "PodDisruptionBudget")
    for pod in there:
        mine = [each for each in budgets if selects(each["spec"]["selector"]["matchLabels"], pod.labels)]
        if pod.role in SERVING and len(mine) != 1:
            yield f"{pod.owner}: {len(mine)} PodDisruptionBudgets select its pods; one should"
        for budget in mine:
            if budget["spec"].get("maxUnavailable", 0) in (0, "0%"):
                yield f"{name_of(budget)}: it lets no pod go, so no node can be drained; set maxUnavailable"
    for budget in budgets:
        if not any(selects(budget["spec"]["selector"]["matchLabels"], pod.labels) for pod in there):
            yield f"{name_of(budget)}: it selects no pod"


def _service(service: Document, there: list[Pod]) -> Iterator[str]:
    chosen = [pod for pod in there if selects(service["spec"].get("selector", {}), pod.labels)]
    if not chosen:
        yield f"{name_of(service)}: it selects no pod"
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        for pod in chosen:
            if not _has_port(pod, target):
                yield f"{name_of(service)}: {pod.owner} has no port {target}"
            elif service["spec"].get("clusterIP") == "None" and _number(pod, target) != port["port"]:
                yield (
                    f"{name_of(service)}: it is headless, so its port {port['port']} is not translated; "
                    f"{pod.owner} listens on {_number(pod, target)}"
                )


def _has_port(pod: Pod, port: str | int) -> bool:
    return port in (pod.ports() if isinstance(port, str) else pod.ports().values())


def _number(pod: Pod, port: str | int) -> int:
    return pod.ports()[port] if isinstance(port, str) else port


def _discovery(there: list[Pod], documents: list[Document]) -> Iterator[str]:
    """The router looks up a headless Service that lists prefill and decode workers on their port."""
    services = {each["metadata"]["name"]: each for each in of_kind(documents, "Service")}
    for router in (pod for pod in there if pod.role == "router"):
        try:
            scheme, _, rest = effective_settings(router, documents).discovery.partition("://")
        except (ConfigError, KeyError):
            continue  # told by the pod's own rules
        name, _, port = rest.partition(":")
        service = services.get(name)
        if scheme != "dns" or service is None or service["spec"].get("clusterIP") != "None":
            yield f"{router.owner}: {scheme}://{rest} is no headless Service among the objects"
            continue
        found = {pod.role for pod in there if selects(service["spec"]["selector"], pod.labels)}
        if found != {"prefill", "decode"}:
            yield f"{name_of(service)}: it lists {', '.join(sorted(found))}; prefill and decode workers"
        if int(port) not in [each["port"] for each in service["spec"]["ports"]]:
            yield f"{router.owner}: {name} has no port {port}"


def _policy(policy: Document, there: list[Pod]) -> Iterator[str]:
    spec = policy["spec"]
    chosen = [pod for pod in there if selects(spec["podSelector"].get("matchLabels", {}), pod.labels)]
    if not chosen and "redis" not in policy["metadata"]["name"]:
        yield f"{name_of(policy)}: it selects no pod"
    for rule in spec.get("ingress", []):
        for pod in chosen:
            yield from (f"{name_of(policy)}: {each}" for each in _open(rule, pod))
        yield from (f"{name_of(policy)}: {each}" for each in _peers(rule.get("from", []), there))
    for rule in spec.get("egress", []):
        for peer in _within(rule.get("to", [])):
            for pod in there:
                if selects(peer, pod.labels):
                    yield from (f"{name_of(policy)}: {each}" for each in _open(rule, pod))
        yield from (f"{name_of(policy)}: {each}" for each in _peers(rule.get("to", []), there))


def _within(peers: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Label selectors of peers in the same namespace."""
    return [each["podSelector"]["matchLabels"] for each in peers if "namespaceSelector" not in each]


def _peers(peers: Iterable[Mapping[str, Any]], there: list[Pod]) -> Iterator[str]:
    for peer in _within(peers):
        if not any(selects(peer, pod.labels) for pod in there) and "redis" not in str(peer):
            yield f"no pod has the labels {peer}"


def _open(rule: Mapping[str, Any], pod: Pod) -> Iterator[str]:
    """What a rule opens of a pod is a port of it, or the range that UCX was given."""
    if not rule.get("ports"):
        yield f"a rule opens every port of {pod.owner}"
    variables = {e["name"]: e.get("value") for c in pod.containers for e in c.get("env", [])}
    for port in rule.get("ports", []):
        if "endPort" in port:
            opened, given = f"{port['port']}-{port['endPort']}", variables.get("UCX_TCP_PORT_RANGE")
            if opened != given:
                yield f"it opens {opened}, but UCX_TCP_PORT_RANGE of {pod.owner} is {given}"
        elif not _has_port(pod, port["port"]):
            yield f"{pod.owner} has no port {port['port']}"


def _monitor(monitor: Document, there: list[Pod], documents: list[Document]) -> Iterator[str]:
    spec = monitor["spec"]
    wanted = spec["selector"]["matchLabels"]
    endpoints = spec.get("podMetricsEndpoints") or spec.get("endpoints") or []
    if monitor["kind"] == "PodMonitor":
        names = [set(pod.ports()) for pod in there if selects(wanted, pod.labels)]
    else:
        names = [
            {port["name"] for port in service["spec"]["ports"]}
            for service in of_kind(documents, "Service")
            if selects(wanted, service["metadata"].get("labels", {}))
        ]
    if not names:
        yield f"{name_of(monitor)}: it selects nothing"
    for endpoint in endpoints:
        if not all(endpoint["port"] in known for known in names):
            yield f"{name_of(monitor)}: not all that it selects has a port {endpoint['port']}"


def _scaler(scaler: Document, documents: list[Document]) -> Iterator[str]:
    spec = scaler["spec"]
    deployments = {each["metadata"]["name"]: each for each in of_kind(documents, "Deployment")}
    target = deployments.get(spec["scaleTargetRef"]["name"])
    if target is None:
        yield f"{name_of(scaler)}: there is no Deployment {spec['scaleTargetRef']['name']}"
    elif "replicas" in target["spec"]:
        yield f"{name_of(target)}: `replicas` sets back what {name_of(scaler)} decides; leave it out"
    least = spec.get("minReplicaCount", spec.get("minReplicas", 0))
    most = spec.get("maxReplicaCount", spec.get("maxReplicas", 0))
    if not 1 <= least < most:
        yield f"{name_of(scaler)}: {least} to {most} replicas leave nothing to decide, or nobody to serve"
