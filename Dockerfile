# The relay as a sidecar's image. BASE is any Debian-like image with `python3` 3.11 or newer and its venv module.
#   docker build -t outbox-relay .
#   docker build -t outbox-relay --build-arg EXTRAS='[otel]' .      with spans (docs/tracing.md)
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sql sql
COPY relay relay
# Pinned, and wheels only: no compiler is wanted, here or in the image.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_ONLY_BINARY=:all: PIP_NO_CACHE_DIR=1
RUN python3 -m venv /build \
    && /build/bin/pip install hatchling \
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
