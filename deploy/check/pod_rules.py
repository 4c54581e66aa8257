"""What each pod has to be like. A rule yields sentences about what is wrong; none when nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.errors import ConfigError
from core.settings import Settings
from deploy.check.pods import Document, Pod, of_kind, references
from deploy.check.process import effective_settings

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
CLOSE_S = 10
"""What a process needs after its drain timeout: cancelled requests' last words, tiers, connections."""

SECRETS = {
    "baton": {"api-key", "cluster-token", "redis-password"},
    "baton-redis": {"url"},
    "baton-https": {"tls.crt", "tls.key", "ca.crt"},
    "baton-cluster-tls": {"tls.crt", "tls.key", "ca.crt"},
}
"""Those that docs/deploy/kubernetes.md tells how to make, with their keys."""


def pod_problems(pod: Pod, documents: list[Document]) -> Iterator[str]:
    """All rules that look at one pod."""
    for container in pod.containers:
        where = f"{pod.owner}, container {container['name']}"
        for rule in (_probes, _resources, _image, _container_security, _variables, _mounts):
            for problem in rule(pod, container):
                yield f"{where}: {problem}"
    for rule in (_pod_security, _strategy, _spread):
        for problem in rule(pod):
            yield f"{pod.owner}: {problem}"
    for problem in _names(pod, documents):
        yield f"{pod.owner}: {problem}"
    if pod.role in ("router", "prefill", "decode"):
        for problem in _process(pod, documents):
            yield f"{pod.owner}: {problem}"


def _probes(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    ports = pod.ports()
    for name in PROBES:
        probe = container.get(name)
        if probe is None:
            yield f"it has no {name}"
            continue
        asks = probe.get("httpGet") or probe.get("tcpSocket")
        if asks is None:
            yield f"its {name} neither gets nor connects"
        elif asks["port"] not in ports and asks["port"] not in ports.values():
            yield f"its {name} asks port {asks['port']}, which it does not have"


def _resources(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    resources = container.get("resources", {})
    for kind in ("requests", "limits"):
        for resource in ("cpu", "memory"):
            if resource not in resources.get(kind, {}):
                yield f"it has no {kind} of {resource}"
    for resource, number in resources.get("limits", {}).items():
        if "/" in resource and resources.get("requests", {}).get(resource) != number:
            yield f"its request of {resource} should equal its limit: devices are not overcommitted"


def _image(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    _, _, tag = container["image"].rpartition("/")[2].partition(":")
    if not tag or tag == "latest":
        yield f"its image {container['image']} has no tag that stays the same"


def _container_security(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield "it may gain privileges; set allowPrivilegeEscalation: false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "its root can be written; set readOnlyRootFilesystem: true"
    if context.get("privileged"):
        yield "it is privileged"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "it does not drop all capabilities"
    rdma = any(name.startswith("rdma/") for name in container.get("resources", {}).get("limits", {}))
    if surplus := set(capabilities.get("add", [])) - ({"IPC_LOCK"} if rdma else set()):
        yield f"it adds the capabilities {', '.join(sorted(surplus))}; IPC_LOCK alone may be, with rdma/*"
    if rdma and "IPC_LOCK" not in capabilities.get("add", []):
        yield "it has RDMA and not the capability IPC_LOCK"


def _variables(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    known: list[str] = []
    for entry in container.get("env", []):
        for name in references(entry.get("value") or ""):
            if name not in known:
                yield f"the variable {entry['name']} uses $({name}), which is not defined before it"
        if entry["name"] in known:
            yield f"the variable {entry['name']} is defined twice"
        known.append(entry["name"])
    for word in (*container.get("command", []), *container.get("args", [])):
        for name in references(word):
            if name not in known:
                yield f"{word} uses $({name}), which is not defined"


def _mounts(pod: Pod, container: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"it mounts the volume {mount['name']}, which the pod does not have"


def _pod_security(pod: Pod) -> Iterator[str]:
    context = pod.spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "it may run as root; set runAsNonRoot and runAsUser"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "it has no seccompProfile RuntimeDefault"
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "it gets a token for the API server, which nothing here needs"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(name):
            yield f"it has {name}"


def _strategy(pod: Pod) -> Iterator[str]:
    surge, away = pod.strategy.get("maxSurge"), pod.strategy.get("maxUnavailable")
    if pod.role == "prefill" and surge != 0:
        yield f"maxSurge is {surge}: a roll-out of prefill workers would need another GPU; 0"
    if pod.role in ("decode", "router") and away != 0:
        yield f"maxUnavailable is {away}: a roll-out would take one away before its successor serves; 0"


def _spread(pod: Pod) -> Iterator[str]:
    if pod.role == "decode":
        spread = {each["topologyKey"] for each in pod.spec.get("topologySpreadConstraints", [])}
        if "kubernetes.io/hostname" not in spread:
            yield "decode workers may all be on one node; spread them by kubernetes.io/hostname"


def _names(pod: Pod, documents: list[Document]) -> Iterator[str]:
    """Whatever it names is there, or is a Secret that the operator makes."""
    accounts = {each["metadata"]["name"] for each in of_kind(documents, "ServiceAccount")}
    if pod.spec.get("serviceAccountName") not in accounts:
        yield f"its ServiceAccount {pod.spec.get('serviceAccountName')} is not among the objects"
    configs = {each["metadata"]["name"] for each in of_kind(documents, "ConfigMap")}
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume and volume["configMap"]["name"] not in configs:
            yield f"its ConfigMap {volume['configMap']['name']} is not among the objects"
        if "secret" in volume and volume["secret"]["secretName"] not in SECRETS:
            yield f"it mounts the Secret {volume['secret']['secretName']}, which the docs do not name"
    for container in pod.containers:
        for entry in container.get("env", []):
            wanted = entry.get("valueFrom", {}).get("secretKeyRef")
            if wanted and wanted["key"] not in SECRETS.get(wanted["name"], ()):
                yield f"it wants {wanted['key']} of the Secret {wanted['name']}, which the docs do not name"


def _process(pod: Pod, documents: list[Document]) -> Iterator[str]:
    """Its settings are known ones, and its life fits them."""
    try:
        settings = effective_settings(pod, documents)
    except (ConfigError, KeyError) as error:
        yield f"its process would not start: {error}"
        return
    yield from _grace(pod, settings)
    yield from _listens(pod, settings)


def _grace(pod: Pod, settings: Settings) -> Iterator[str]:
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    sleep = pod.containers[0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    if "seconds" not in sleep:
        yield "it has no preStop sleep: it would be asked for work while it leaves"
    needs_s = sleep.get("seconds", 0) + settings.shutdown_grace_s + settings.drain_timeout_s + CLOSE_S
    if grace_s < needs_s:
        yield (
            f"terminationGracePeriodSeconds is {grace_s}, but preStop, shutdown_grace_s, drain_timeout_s and "
            f"{CLOSE_S} s to close take {needs_s:g} s"
        )
    if pod.role == "router" and settings.drain_timeout_s < settings.request_timeout_s:
        yield "a router is cut off before its longest request is over: drain_timeout_s < request_timeout_s"


def _listens(pod: Pod, settings: Settings) -> Iterator[str]:
    ports, expected = pod.ports(), {"http": settings.port}
    if pod.role != "router":
        expected = {"grpc": int(settings.listen.rpartition(":")[2]), "probes": settings.probe_port}
    for name, number in expected.items():
        if ports.get(name) != number:
            yield f"its port {name} is {ports.get(name)}, its process listens on {number}"
