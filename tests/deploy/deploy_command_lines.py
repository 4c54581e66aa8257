"""Command lines tried by the real CLI with `--check`, all in one process: torch is imported once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from deploy.check.render import ROOT

_DRIVER = """
import contextlib, io, json, os, sys
from services.cli import main
results = []
for argv, env in json.load(sys.stdin):
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        del os.environ[name]
    os.environ.update(env)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = main([*argv, "--check"])
        except SystemExit as end:
            status = end.code
    results.append((status, said.getvalue().strip()))
print(json.dumps(results))
"""


def outcomes(lines: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[tuple[int, str]]:
    """Exit status and what was said, of each (arguments, environment)."""
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps([(list(argv), dict(env)) for argv, env in lines]),
        capture_output=True, text=True, cwd=ROOT, timeout=90, check=True,
    )  # fmt: skip
    return [(status, said) for status, said in json.loads(done.stdout)]
