"""The PromQL that panels are made of. Everything is of the namespaces that the dashboard's reader chose."""

from __future__ import annotations

HERE = 'namespace=~"$namespace"'


def series(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join((HERE, *matchers))}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Per second; of all series together, or by labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({series(metric, *matchers)}[$__rate_interval]))"


def total(metric: str, *matchers: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({series(metric, *matchers)})"


def quantile(q: float, metric: str, *matchers: str, by: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', *matchers, by=f'le, {by}' if by else 'le')})"


def percentiles(metric: str, *matchers: str) -> list[tuple[str, str]]:
    return [(f"p{round(100 * q)}", quantile(q, metric, *matchers)) for q in (0.5, 0.9, 0.99)]


def mean(sum_of: str, number: str, by: str) -> str:
    return f"{rate(sum_of, by=by)} / {rate(number, by=by)}"
