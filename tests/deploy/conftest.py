"""What the tests of manifests share: everything that kustomize renders, once."""

from __future__ import annotations

import pytest

from deploy.check.render import compositions


@pytest.fixture(scope="session")
def rendered() -> dict[str, str]:
    """Name of an overlay, or of overlay and components -> YAML."""
    return dict(compositions())
