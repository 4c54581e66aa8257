"""`baton role WORKER ROLE`: let a worker finish what it does and take the other role.

Asks the admin port of a router that runs. Exit status 0 when it has begun or there is nothing to do, else 1.
"""

from __future__ import annotations

import sys
import urllib.parse

import orjson

from core.errors import ConfigError, RequestError, Unavailable
from core.settings import Settings
from services.ask import ask, local_url


def run(settings: Settings, worker: str, role: str, router: str) -> int:
    """`worker`: its id or incarnation; `router`: the URL of an admin port, "" = on this machine, as the
    settings say. Raises ConfigError where they do not say."""
    if not router and settings.admin_port is None:
        raise ConfigError(
            "where is the router's admin port? Say --router URL, or --admin-port N for this machine"
        )
    origin = router.rstrip("/") or local_url(settings, settings.admin_host, settings.admin_port or 0)
    url = f"{origin}/v1/cluster/workers/{urllib.parse.quote(worker, safe='')}/role"
    try:
        answer = orjson.loads(ask(url, settings, orjson.dumps({"role": role})))
        print(f"{answer['id']} is a {answer['role']} worker, {answer['state']}")
        return 0
    except (Unavailable, RequestError) as error:
        print(f"baton: {error.message}", file=sys.stderr)
    except (ValueError, KeyError, TypeError):
        print(
            f"baton: {origin} answers in a form that is unknown here; is it an admin port?", file=sys.stderr
        )
    return 1
