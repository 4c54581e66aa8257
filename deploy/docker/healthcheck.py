"""`python healthcheck.py URL`: exit status 0 when the probe there answers 200, for Docker's HEALTHCHECK."""

import sys
import urllib.request

TIMEOUT_S = 3.0


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            return reply.status == 200
    except OSError:  # a refused connection, silence, and every status over 399
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1]) else 1)
