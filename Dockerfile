# The relay as a sidecar's image. BASE is any Debian-like image with `python3` 3.11 or newer and its venv module.
#   docker build -t outbox-relay .
#   docker build -t outbox-relay --build-arg EXTRAS='[otel]' .      with spans (docs/tracing.md)
#   docker build -t outbox-relay --build-arg BUILD=pure .           without a compiler
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY .ci/hatch_build.py .ci/
COPY sql sql
COPY relay relay
# The hot path is compiled (docs/decisions/0021-a-compiled-build.md); the image gets no compiler. BUILD=pure does without.
ARG BUILD=compiled
# hadolint ignore=DL3008,SC2046
RUN if [ "$BUILD" = compiled ] && ! command -v gcc; then \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
        $(case "$(command -v python3)" in /usr/bin/*) echo python3-dev ;; esac) \
    && rm -rf /var/lib/apt/lists/*; fi
# Pinned, and wheels only, but for the relay's own.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_ONLY_BINARY=:all: PIP_NO_CACHE_DIR=1
RUN python3 -m venv /build \
    && /build/bin/pip install hatchling mypy setuptools \
    && export OUTBOX_RELAY_BUILD="$BUILD" \
    && /build/bin/pip wheel --no-deps --no-build-isolation --no-binary outbox-relay -w /dist .
RUN python3 -m venv /opt/relay \
    && /opt/relay/bin/pip install "$(ls /dist/*.whl)${EXTRAS}" \
    && /opt/relay/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
LABEL org.opencontainers.image.title="outbox-relay" \
      org.opencontainers.image.description="Publishes the rows of a PostgreSQL outbox table to RabbitMQ" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/relay /opt/relay
ENV PATH=/opt/relay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Nobody's number, by number, so that Kubernetes can tell that it is not root.
USER 65532:65532
# /metrics /livez /readyz; `relay inbox run` has them at 9762.
EXPOSE 9761 9762
STOPSIGNAL SIGTERM
# Of `relay run`. /livez, never /readyz: an outage of the broker is no reason to restart the relay.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["python3", "-c", "\
import os, urllib.request as u; \
host, _, port = os.environ.get('RELAY_LISTEN', '0.0.0.0:9761').rpartition(':'); \
host = {'': '127.0.0.1', '0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host); \
port and u.build_opener(u.ProxyHandler({})).open('http://' + host + ':' + port + '/livez', timeout=4)"]
ENTRYPOINT ["relay"]
CMD ["run"]
