"""The head of a Ray cluster for tests: its store alone, without a raylet and a dashboard."""

import subprocess
from pathlib import Path

import ray

from services.address import free_port


class RayHead:
    """Starts at once; answers a moment later."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self._directory = directory
        self.start()

    def start(self) -> None:
        program = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "gcs.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(str(program), f"--gcs_server_port={self.port}", "--node-ip-address=127.0.0.1"),
                    *("--session-name=test", f"--log_dir={self._directory}", "--metrics-agent-port=-1"),
                    "--config_list=e30=",  # {}
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
