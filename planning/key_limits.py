"""What each API key has in the router at once, and how many tokens it may have a minute.

The tokens of a key are a bucket that holds a minute's worth and fills evenly. A request is charged what it
may cost before it is served and given back what it did not use. One that costs more than the bucket holds
goes when the bucket is full, and leaves it in debt: no request is refused for ever. Over a long time a key
has its limit a minute; after a pause a minute may see up to twice that, the full bucket and what flows in
meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.fair_queue import Share

MINUTE_S = 60.0


@dataclass(slots=True)
class _Account:
    num_requests: int = 0
    limit: int = 0
    tokens: float = 0.0  # in the bucket; below 0 is debt
    at: float = 0.0


class KeyLimits:
    """Accounts by the keys' names. A limit that changes holds from the next request on; where there was none
    before, the bucket is full."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def enter(self, share: Share, now: float) -> bool:
        """Count a request; False (nothing is counted) where the key has all that it may have at once."""
        account = self._account(share, now)
        if share.max_concurrent and account.num_requests >= share.max_concurrent:
            return False
        account.num_requests += 1
        return True

    def exit(self, share: Share) -> None:
        """A request that `enter` counted is over."""
        self._accounts[share.name].num_requests -= 1

    def charge(self, share: Share, tokens: int, now: float) -> float:
        """Take tokens from the bucket: 0.0; or take none: seconds until there would be enough."""
        if not share.max_tokens_per_minute:
            return 0.0
        account = self._account(share, now)
        missing = min(tokens, share.max_tokens_per_minute) - account.tokens
        if missing > 0:
            return missing * MINUTE_S / share.max_tokens_per_minute
        account.tokens -= tokens
        return 0.0

    def refund(self, share: Share, tokens: int) -> None:
        """Give back tokens that `charge` took (the next `charge` caps what the bucket holds)."""
        if share.max_tokens_per_minute:
            self._accounts[share.name].tokens += tokens

    def _account(self, share: Share, now: float) -> _Account:
        """Filled up to `now`."""
        limit = share.max_tokens_per_minute
        account = self._accounts.get(share.name)
        if account is None:
            account = self._accounts[share.name] = _Account()
        filled = account.tokens + (now - account.at) * limit / MINUTE_S if account.limit else limit
        account.limit, account.tokens, account.at = limit, min(filled, limit), now
        return account
