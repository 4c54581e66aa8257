"""A real Prometheus for tests. `make prometheus` fetches one; a machine's own will do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.address import free_port

START_S = 30.0


def find(program: str = "prometheus") -> str | None:
    """Path of `prometheus` or `promtool`: this environment's, else the machine's."""
    ours = Path(sys.prefix) / "prometheus/usr/bin" / program
    return str(ours) if ours.exists() else shutil.which(program)


class Prometheus:
    """Scrapes `targets` every second; use as a context manager, which is left when it is gone.

    `targets`: (host:port, labels that the Prometheus Operator would give, further options of the job).
    """

    def __init__(
        self, folder: Path, targets: Sequence[tuple[str, Mapping[str, str], Mapping[str, Any]]]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        jobs = [
            {
                "job_name": f"job-{number}",
                "static_configs": [{"targets": [target], "labels": dict(labels)}],
                **options,
            }
            for number, (target, labels, options) in enumerate(targets)
        ]
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._folder = folder

    def __enter__(self) -> Prometheus:
        program = find()
        assert program, "there is no prometheus; make prometheus"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that it evaluates to now, each with `metric` and `value` (time, text). ValueError, with
        Prometheus' own words, for what is no PromQL."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10).json()
        if reply["status"] != "success":
            raise ValueError(reply["error"])
        data = reply["data"]
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False
