"""Which addresses have workers. Nothing more: what is behind an address, its `Watch` stream tells.

    static://host:port,...    a list that never changes
    dns://name:port           every A and AAAA record of a name, such as a headless service's
    dns://_service._tcp.name  its SRV records, which bring the ports
    redis://host:port/db      workers announce themselves there (also rediss:// and unix://, with redis-py's
                              options behind `?`)
    ray://                    workers announce themselves to an actor of the Ray cluster that this host is
                              part of; ray://host:port and ray://host:port/namespace name another

The last two are leases: a worker renews its own while it takes work, withdraws it when it drains, and is
forgotten `discovery_lease_s` after its last word. When nobody answers, the last set holds.
"""

from __future__ import annotations

from core.errors import ConfigError
from core.settings import Settings
from services.discovery.announcement import Announcement, Register
from services.discovery.polled import Polled
from services.discovery.source import Discovery
from services.discovery.static import StaticDiscovery

__all__ = ["Announcement", "Discovery", "StaticDiscovery", "announcement_for", "from_settings"]

SCHEMES = ("static", "dns", "redis", "rediss", "unix", "ray")


def from_settings(settings: Settings) -> Discovery:
    """Where a router finds workers. Raises ConfigError, listing the known schemes, without the URL: it may
    hold a password."""
    scheme, rest = _split(settings.discovery)
    if scheme == "static":
        return StaticDiscovery.read(rest)
    if scheme == "dns":
        from services.discovery import dns

        source = dns.lookup(rest)
    else:
        source = _register(scheme, rest)
    return Polled(source, poll_s=settings.discovery_poll_s, grace_s=settings.discovery_lease_s)


def announcement_for(settings: Settings) -> Announcement | None:
    """What a worker with these settings (its `advertise` filled in) has to keep up; None where routers know
    it without. Raises ConfigError as `from_settings` does."""
    if not settings.discovery:
        return None
    scheme, rest = _split(settings.discovery)
    if scheme in ("static", "dns"):
        return None
    return Announcement(_register(scheme, rest), settings.advertise, settings.discovery_lease_s)


def _split(url: str) -> tuple[str, str]:
    if not url:
        raise ConfigError("the router needs to know its workers: --discovery static://host:port,host:port")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        named = f"scheme {scheme[:20]!r}" if separator else "URL without a scheme"
        raise ConfigError(f"--discovery: its {named} is not known; known: {known}")
    return scheme, rest


def _register(scheme: str, rest: str) -> Register:
    """A module is imported when its scheme is used: routers need neither Redis nor Ray otherwise."""
    if scheme == "ray":
        from services.discovery.ray_register import RayRegister

        return RayRegister.read(rest)
    from services.discovery.redis_register import RedisRegister

    return RedisRegister(f"{scheme}://{rest}")
