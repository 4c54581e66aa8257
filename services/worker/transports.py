"""What a worker offers to peers, so that they can read its blocks."""

from __future__ import annotations

from core.settings import Settings
from kvtransfer.collective_transport import CollectiveTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.ranks import MakeTransport
from kvtransfer.shm_transport import ShmTransport
from services import address


def transports(settings: Settings, worker_id: str, device_type: str) -> dict[str, MakeTransport]:
    """By name. `auto` leaves NIXL out while all peers are on this host, unless the pool is on a GPU, which
    other processes reach through NIXL alone.
    """
    on_gpu = device_type == "cuda"
    made: dict[str, MakeTransport] = {}
    host, _ = address.split(settings.advertise or settings.listen, "--advertise")
    listen_host, _ = address.split(settings.listen, "--listen")
    elsewhere = not address.is_loopback(host)
    if settings.transport in ("auto", "shm") and not on_gpu:
        made["shm"] = ShmTransport
    if settings.transport == "nixl" or (settings.transport == "auto" and (elsewhere or on_gpu)):
        made["nixl"] = lambda region: NixlTransport(region, worker_id)
    if settings.transport == "collective":
        made["collective"] = lambda region: CollectiveTransport(region, listen_host, host)
    return made
