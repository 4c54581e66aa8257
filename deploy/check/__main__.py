"""`python -m deploy.check`: renders every overlay and says what is wrong. Exit status 1 if anything is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.check.link_rules import link_problems
from deploy.check.pod_rules import pod_problems
from deploy.check.pods import Document, pods
from deploy.check.queries import query_problems
from deploy.check.render import K8S, RenderError, compositions, documents
from deploy.check.schemas import core_problems, custom_problems, is_custom, validator


def problems(text: str) -> Iterator[str]:
    """Everything that is wrong with rendered objects. Custom resources are left out without their schemas."""
    objects = documents(text)
    yield from core_problems(objects)
    if script := validator():
        yield from custom_problems(text, script)
    yield from rule_problems(objects)


def rule_problems(objects: list[Document]) -> Iterator[str]:
    """What our own rules find."""
    for pod in pods(objects):
        yield from pod_problems(pod, objects)
    yield from link_problems(objects)
    yield from query_problems(objects)


def main(k8s: Path = K8S) -> int:
    bad = 0
    try:
        for name, text in compositions(k8s):
            found = list(problems(text))
            objects = documents(text)
            unchecked = 0 if validator() else sum(map(is_custom, objects))
            note = f", {unchecked} custom resources NOT checked" if unchecked else ""
            print(f"{name}: {len(objects)} objects, {len(found)} problems{note}")
            for problem in found:
                print(f"    {problem}")
            bad += len(found)
    except RenderError as error:
        print(error)
        return 1
    if validator() is None:
        print("SKIPPED: custom resources against their schemas; set BATON_SHARED to the folder that has them")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
