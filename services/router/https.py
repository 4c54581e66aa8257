"""HTTPS of the router: its certificate, tried out at start and renewed while it serves."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from starlette.types import ASGIApp

from core.errors import ConfigError
from core.settings import Settings
from services.router.connection import RequireCertificate, bounded
from wire.certificates import PemFiles, server_context

LOOK_EVERY_S = 10.0
_FLAGS = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")


class HTTPS:
    """The TLS side of one router's HTTP. Without --ssl-certfile there is none: `context` is None.

    Raises ConfigError for files that cannot be read or do not belong together.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.context: ssl.SSLContext | None = None
        paths = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        if not paths[0]:
            given = [flag for flag, path in zip(_FLAGS, paths, strict=True) if path]
            if given:
                raise ConfigError(f"{' and '.join(given)} without --ssl-certfile; give the certificate too")
            return
        self._paths = paths
        self._files = PemFiles(paths, _FLAGS)
        self.context = server_context(*paths, _FLAGS)

    @property
    def scheme(self) -> str:
        return "https" if self.context else "http"

    def protect(self, app: ASGIApp) -> ASGIApp:
        """The application as clients may reach it."""
        return RequireCertificate(app) if self._settings.ssl_ca_certs else app

    def options(self) -> dict[str, Any]:
        """What uvicorn.Config is to be told."""
        options: dict[str, Any] = {"http": bounded(self._settings.max_header_bytes)}
        if context := self.context:
            options["ssl_context_factory"] = lambda config, default: context
        return options

    async def follow(self) -> None:
        """Take over replaced files, for new connections, until cancelled. A CA that is taken out of its file
        is believed until the next start."""
        while self.context:
            await asyncio.sleep(LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> None:
        """Take over replaced files; what does not belong together yet is left for the next time."""
        self._files.renewed(self._load)

    def _load(self) -> None:
        assert self.context
        cert, key, ca = self._paths
        server_context(cert, key, ca, _FLAGS)  # first on one that nobody uses
        self.context.load_cert_chain(cert, key or None, password="")
        if ca:
            self.context.load_verify_locations(ca)
