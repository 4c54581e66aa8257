"""`baton COMMAND --check`: would this process start with these settings?

Says what a start would, as far as that needs no model, no port and no peer. The files that settings name
(certificates, API keys) are read.
"""

from __future__ import annotations

from core import faults
from core.errors import ConfigError
from core.settings import Settings
from services import address, discovery
from services.host_list import HostList
from wire.channel import Identity


def check(settings: Settings, command: str) -> None:
    """`command`: serve, router, prefill or decode. Raises ConfigError for what a start would refuse."""
    Identity.of(settings)
    if command in ("serve", "router"):
        _check_router(settings)
    if command != "router":
        _check_worker(settings)
    if command in ("prefill", "decode"):
        address.announced(settings.listen, settings.advertise)
        discovery.announcement_for(settings)
    if command == "router":
        discovery.from_settings(settings)
    if command == "serve" and settings.discovery:
        raise ConfigError("`baton serve` starts its own workers; with --discovery run `baton router`")


def _check_router(settings: Settings) -> None:
    from services.router.https import HTTPS
    from services.router.keys import load_keys

    HTTPS(settings)
    load_keys(settings)


def _check_worker(settings: Settings) -> None:
    import torch

    from services.worker.check import check_combination
    from services.worker.cpu import parse_cores

    address.split(settings.listen, "--listen")
    HostList.parse(settings.transfer_hosts)
    parse_cores(settings.cpu_affinity)
    faults.configure(settings.faults)
    check_combination(settings, torch.device("cpu" if settings.device == "auto" else settings.device))
