"""Rendered objects against the schemas of Kubernetes and of the custom resources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import kubernetes_validate
from kubernetes_validate.utils import SchemaNotFoundError, ValidationError

from deploy.check.pods import Document, name_of
from deploy.check.render import documents

VERSION = "1.34"
"""The oldest Kubernetes that the manifests are written for: preStop's sleep is stable in it."""

TIMEOUT_S = 60


def core_problems(objects: Iterable[Document]) -> Iterator[str]:
    """Of Kubernetes' own kinds, unknown fields included; custom resources are left to `custom_problems`."""
    for document in objects:
        if is_custom(document):
            continue
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except SchemaNotFoundError:
            yield f"{name_of(document)}: Kubernetes {VERSION} has no such kind in {document['apiVersion']}"
        except ValidationError as error:
            yield f"{name_of(document)}: {'.'.join(map(str, error.path))}: {error.message}"


def is_custom(document: Document) -> bool:
    """Its API group is not one of Kubernetes' own."""
    group = document["apiVersion"].rpartition("/")[0]
    return "." in group and (not group.endswith(".k8s.io") or ".x-k8s.io" in group or "gateway" in group)


def validator() -> Path | None:
    """The script that knows the schemas of custom resources, other projects' data; None without it."""
    shared = os.environ.get("BATON_SHARED")
    script = Path(shared or "") / "k8s-schemas/validate.py"
    return script if shared and script.is_file() else None


def custom_problems(text: str, script: Path) -> Iterator[str]:
    """Of custom resources, those without a schema included."""
    custom = sum(map(is_custom, documents(text)))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        done = subprocess.run(
            [sys.executable, str(script), file.name],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        lines = (done.stdout + done.stderr).replace(file.name, "").splitlines()
    checked = re.search(r"^(\d+) documents? checked", done.stdout, re.MULTILINE)
    if done.returncode:
        yield from (line for line in lines if not line.startswith("no schema") and line.strip())
    elif checked is None or int(checked[1]) != custom:
        yield f"{custom} custom resources, but {checked and checked[1]} were checked"
