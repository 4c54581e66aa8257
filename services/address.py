"""Addresses of this process: `host:port` read, tried, listened on and told to peers.

An IPv6 host stands in brackets wherever a port follows it, and without them elsewhere.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from core.errors import ConfigError


def split(address: str, flag: str) -> tuple[str, int]:
    """`host:port` -> (host without brackets, port). Raises ConfigError, naming the `flag` that holds it."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag} {address!r} is not host:port, or [host]:port for IPv6")
    return host[1:-1] if bracketed else host, int(port)


def join(host: str, port: int) -> str:
    """`host:port`, as `split` reads it and as a URL has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, host_flag: str = "--host", port_flag: str = "--port") -> socket.socket:
    """A socket that listens there; port 0 = any. Raises ConfigError with the system's reason, naming
    the flag to change."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        return listener
    except UnicodeError:
        why, flag = "not a host name", host_flag
    except OSError as error:
        why = error.strerror or str(error)
        flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
    listener.close()
    raise ConfigError(f"cannot listen on {join(host, port)}: {why}; choose another {flag}")


def free_port(host: str) -> int:
    """A port that nobody listens on right now."""
    with bind(host, 0) as listener:
        return listener.getsockname()[1]


def announced(listen: str, advertise: str) -> str:
    """The `host:port` that peers are told: `advertise`, or else `listen`. Raises ConfigError for one
    that nobody can connect to."""
    flag, address = ("--advertise", advertise) if advertise else ("--listen", listen)
    host, port = split(address, flag)
    if is_wildcard(host):
        raise ConfigError(
            f"{flag} {address} is every address of this host and tells peers none; "
            f"name the host:port they reach it at with --advertise"
        )
    if advertise and port == 0:
        raise ConfigError(f"--advertise {address} names no port; give the one that peers connect to")
    return address


def is_wildcard(host: str) -> bool:
    """`0.0.0.0`, `::` and their other spellings."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Only processes of this host can connect to it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable(host: str) -> str:
    """A host that this machine reaches a listener on `host` at: itself, or loopback for all addresses."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"
