# The relay as a sidecar's image. BASE is any Debian-like image with `python` 3.11 or newer and its venv module.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/relay
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sql sql
COPY relay relay
RUN /opt/relay/bin/pip install --no-cache-dir -c constraints.txt . \
    && /opt/relay/bin/pip uninstall --yes pip

FROM ${BASE}
COPY --from=build /opt/relay /opt/relay
ENV PATH=/opt/relay/bin:$PATH PYTHONUNBUFFERED=1
# Writes nothing anywhere: a read-only root file system is fine.
USER 65532:65532
EXPOSE 9761
STOPSIGNAL SIGTERM
# /livez, never /readyz: an outage of the broker is no reason to restart the relay.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["python", "-c", "\
import os, urllib.request; \
listen = os.environ.get('RELAY_LISTEN', '0.0.0.0:9761'); \
listen and urllib.request.urlopen(f'http://127.0.0.1:{listen.rpartition(\":\")[2]}/livez', timeout=4)"]
ENTRYPOINT ["relay"]
CMD ["run"]
