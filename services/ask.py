"""One request of a command to a router that runs: its answer, or a sentence."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException

import orjson

from core.errors import ConfigError, NotFound, RequestError, Unavailable
from core.settings import Settings
from services.address import join, reachable

TIMEOUT_S = 10.0
MAX_NBYTES = 8 * 2**20
"""Of an answer: something else than a router may stand at the address."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Else the key would go wherever the answer says."""

    def redirect_request(self, *_: object) -> None:
        return None


def local_url(settings: Settings, host: str, port: int) -> str:
    """Of a router with these settings on this machine."""
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{join(reachable(host), port)}"


def ask(url: str, settings: Settings, body: bytes | None = None) -> bytes:
    """GET `url`, or POST `body` to it, with the API key of `settings`.

    Raises ConfigError for a URL that is none, Unavailable, RequestError with what the router says against it.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError("--router should be a URL such as http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as reply:
            return reply.read(MAX_NBYTES)
    except urllib.error.HTTPError as error:
        raise _refusal(error.code, error.read(MAX_NBYTES)) from None
    except urllib.error.URLError as error:
        why = error.reason
        if isinstance(why, ssl.SSLError):
            why = f"{why.reason or why}; SSL_CERT_FILE names a CA to trust"
        raise Unavailable(f"no router answers at {_origin(url)}: {why}; name it with --router URL") from None
    except (OSError, HTTPException, ValueError) as error:
        why = str(error) or type(error).__name__
        raise Unavailable(f"no router answers at {_origin(url)}: {why}; name it with --router URL") from None


def _origin(url: str) -> str:
    return url.partition("/v1/")[0]


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "what is not a router's answer; is the URL right?"
    hint = "; here it comes from BATON_API_KEY" if status in (401, 403) else ""
    kind = NotFound if status == 404 else RequestError
    return kind(f"the router answers {status}: {message}{hint}")
