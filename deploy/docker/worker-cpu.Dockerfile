# syntax=docker/dockerfile:1
# A worker on CPUs, and `baton serve`, which is what it runs when told nothing else. From the root of the tree:
#     docker build --file deploy/docker/worker-cpu.Dockerfile --build-arg TORCH_INDEX_URL=URL \
#         --tag baton-worker-cpu:0.1.0 .
# URL: PyTorch's index of CPU wheels. Without it torch comes with CUDA, gigabytes that nothing here uses.
# Base images are pinned by tag; add the digest that your registry gives to both FROM lines.

FROM python:3.11.11-slim-bookworm AS build
ARG TORCH_INDEX_URL=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements-nodeps.txt deploy/docker/constraints.txt ./
RUN python -m venv /opt/baton \
 && /opt/baton/bin/pip install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX_URL:+"--index-url=$TORCH_INDEX_URL"} 'torch==2.13.*'
COPY core/ core/
COPY checkpoint/ checkpoint/
COPY engine/ engine/
COPY kvtransfer/ kvtransfer/
COPY planning/ planning/
COPY services/ services/
COPY wire/ wire/
RUN /opt/baton/bin/pip install --no-cache-dir --constraint constraints.txt '.[worker,dns]' \
 && /opt/baton/bin/pip install --no-cache-dir --no-deps --requirement requirements-nodeps.txt

FROM python:3.11.11-slim-bookworm
# The compiler makes the kernels for the very CPU that the container runs on, when it starts.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 baton \
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
EXPOSE 8000 7000 7001
# For `baton serve`; where one worker runs alone, give --health-cmd with the URL of its --probe-port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "/opt/baton/healthcheck.py", "http://127.0.0.1:8000/live"]
ENTRYPOINT ["baton"]
CMD ["serve", "--host=0.0.0.0", "--port=8000"]
