"""The process that a container runs: its command line, its environment and its effective settings."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.settings import Settings, load
from deploy.check.pods import Document, Pod, expanded, of_kind
from services.flags import parse

SETTINGS_MOUNT = "/etc/baton"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a cluster knows and a manifest only names. `fields`: by fieldPath; `secrets`: by (name, key);
    `paths`: where a mount path is on this machine."""

    fields: Mapping[str, str]
    secrets: Mapping[tuple[str, str], str]
    paths: Mapping[str, str]

    def path(self, text: str) -> str:
        """`text` with each mount path replaced, the longest first."""
        for mount in sorted(self.paths, key=len, reverse=True):
            text = text.replace(mount + "/", self.paths[mount] + "/")
        return text


def environment(container: Mapping[str, Any], around: Surroundings) -> dict[str, str]:
    """As a kubelet makes it. KeyError for a field or a secret that `around` does not have."""
    variables: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            value = around.fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = around.secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        elif "resourceFieldRef" in source:
            kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            value = str(container["resources"][kind][resource])
        else:
            value = expanded(entry.get("value", ""), variables)
        variables[entry["name"]] = around.path(value)
    return variables


def arguments(container: Mapping[str, Any], variables: Mapping[str, str], around: Surroundings) -> list[str]:
    """`command` and `args`; without `command` the image's entry point comes before them."""
    words = [*container.get("command", []), *container.get("args", [])]
    return [around.path(expanded(word, variables)) for word in words]


def config_files(documents: Iterable[Document], name: str) -> dict[str, str]:
    """File name -> content, of a ConfigMap. KeyError when there is none of that name."""
    maps = {document["metadata"]["name"]: document["data"] for document in of_kind(documents, "ConfigMap")}
    return maps[name]


def mounted_config(pod: Pod, documents: Iterable[Document]) -> dict[str, str]:
    """The files that this pod finds in SETTINGS_MOUNT."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    for mount in pod.containers[0].get("volumeMounts", []):
        if mount["mountPath"] == SETTINGS_MOUNT:
            return config_files(documents, volumes[mount["name"]]["configMap"]["name"])
    return {}


class _Anything(dict[Any, str]):
    """Stands for each secret: long enough for all of them."""

    def __missing__(self, key: Any) -> str:
        return "0123456789abcdef" * 2


PLACE = {"status.podIP": "10.0.0.7", "metadata.name": "pod-0", "metadata.namespace": "baton"}


def effective_settings(pod: Pod, documents: Iterable[Document]) -> Settings:
    """What the pod's first container runs with, read by the real command line; secrets are made up.

    Raises ConfigError for a flag, a variable or a key of the settings file that nobody knows.
    """
    container = pod.containers[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in mounted_config(pod, documents).items():
            (Path(folder) / name).write_text(content)
        around = Surroundings(PLACE, _Anything(), {SETTINGS_MOUNT: folder})
        variables = environment(container, around)
        given = parse(arguments(container, variables, around))
        config = given.pop("config")
        flags = {name: value for name, value in given.items() if name in Settings.model_fields}
        return load(flags, variables, config)[0]
