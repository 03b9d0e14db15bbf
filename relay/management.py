"""RabbitMQ's management API: one HTTP client for whoever looks at the broker or declares something there.

Blocking; from an event loop use `asyncio.to_thread`. Owns: how a request is made, TLS, and what an answer that is none
means. Invariant: credentials go into a header, so that no address in an error holds one; every request has a deadline.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

TIMEOUT_S: Final = 10.0

ERROR_CHARACTERS_MAX: Final = 300


class ApiFailed(Exception):
    """The API cannot be reached, or answered something that is no answer. The text holds no secret."""


class ApiRefused(ApiFailed):
    """The API understood the request and said no; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ManagementApi:
    """The API behind a checked RELAY_MANAGEMENT_URL. Each part of a path is quoted here."""

    def __init__(self, url: str) -> None:
        """Raises ApiFailed when the files of the TLS parameters cannot be used."""
        parts = urlsplit(url)
        # urllib would take credentials for a part of the host's name.
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        self._base = urlunsplit(address).rstrip("/").removesuffix("/api")
        pair = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = "Basic " + base64.b64encode(pair.encode()).decode()
        self._tls = _tls(parts.query) if parts.scheme == "https" else None

    def overview(self) -> Mapping[str, Any]:
        """The broker's own document, with its version: the first thing to ask, for any HTTP server answers 404 to the rest.
        Raises ApiFailed, ApiRefused.
        """
        found = self.get("overview")
        if not isinstance(found, dict) or not found.get("rabbitmq_version"):
            raise ApiFailed(f"{self._base} is not RabbitMQ's management API")
        return found

    def get(self, *path: str, **query: str) -> Any:
        """The document at the path; None for 404. Raises ApiFailed, ApiRefused."""
        try:
            return self._ask("GET", path, None, query)
        except ApiRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    def put(self, *path: str, document: Mapping[str, object]) -> None:
        """Create or replace what stands at the path. Raises ApiFailed, ApiRefused."""
        self._ask("PUT", path, document)

    def post(self, *path: str, document: Mapping[str, object]) -> None:
        """Add to the collection at the path. Raises ApiFailed, ApiRefused."""
        self._ask("POST", path, document)

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        document: Mapping[str, object] | None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        address = "/".join([self._base, "api", *(quote(part, safe="") for part in path)])
        if query:
            address += "?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(address, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as failure:
            with failure:
                said = f"{self._base} answered {failure.code} to {method} /api/{'/'.join(path)}{_reason(failure)}"
            raise ApiRefused(said, failure.code) from failure
        except (OSError, ValueError, http.client.HTTPException) as failure:
            reason = failure.reason if isinstance(failure, urllib.error.URLError) else failure
            raise ApiFailed(f"{self._base} cannot be asked: {reason}") from failure


def _tls(query: str) -> ssl.SSLContext:
    """The context that the URL's parameters describe, by the names that the AMQP URL has for them."""
    pairs = (part.partition("=") for part in query.split("&") if part)
    given = {unquote(name): unquote(value) for name, _, value in pairs}
    try:
        context = ssl.create_default_context(cafile=given.get("cafile"), capath=given.get("capath"))
        if "certfile" in given:
            context.load_cert_chain(given["certfile"], given.get("keyfile"))
    except OSError as failure:
        raise ApiFailed(f"RELAY_MANAGEMENT_URL's certificates cannot be used: {failure}") from failure
    if given.get("no_verify_ssl") == "1":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _reason(failure: urllib.error.HTTPError) -> str:
    """What the broker says of its refusal, on one line."""
    try:
        said = json.loads(failure.read(1 << 16))
        text = str(said.get("reason") or said.get("error") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    line = " ".join(text.split())
    return f": {line[:ERROR_CHARACTERS_MAX]}" if line else ""
