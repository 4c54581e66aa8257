"""Addresses to listen on: tried before the model is loaded, refused in one sentence."""

from __future__ import annotations

import os
import socket

from core.errors import ConfigError


def split(address: str, flag: str) -> tuple[str, int]:
    """`host:port` -> (host, port). Raises ConfigError, naming the `flag` that holds it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag} {address!r} is not host:port")
    return host, int(port)


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A socket that listens there; port 0 = any. Raises ConfigError, naming the `flag` to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another {flag}") from None
