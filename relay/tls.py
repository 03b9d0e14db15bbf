"""TLS: the certificate files that a URL names, read before a driver reads them; OpenSSL's errors in words.

A driver finds out at each connect what is wrong with a file, and says it in OpenSSL's terms; an encrypted key may even
ask for its password on the terminal. Every check raises `ValueError` with a few words that name the parameter. Nothing
is kept: the drivers read the files anew at every connect, so that renewed certificates work without a restart.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Callable


def check_readable(name: str, path: str) -> None:
    """A file or directory of that path may be read."""
    if not os.access(path, os.R_OK):
        raise ValueError(f"has {name}={path}, which cannot be read")


def check_authorities(name: str, path: str) -> None:
    """A PEM file of authorities' certificates, or of revocations."""
    check_readable(name, path)
    _load(lambda context: context.load_verify_locations(cafile=path), f"has {name}={path}, which holds no certificate")


def check_authorities_data(name: str, text: str) -> None:
    """An authority's certificate itself: DER, in base64."""
    wrong = f"has a {name} that is no certificate (DER in base64)"
    try:
        data = base64.b64decode(text)
    except binascii.Error:
        raise ValueError(wrong) from None
    _load(lambda context: context.load_verify_locations(cadata=data), wrong)


def check_identity(
    certificate_name: str, certificate: str, key_name: str, key: str | None, *, password: str = ""
) -> None:
    """A client's certificate and its key, which may stand in the certificate's file; PEM."""
    check_readable(certificate_name, certificate)
    said = f"has {certificate_name}={certificate}"
    if key is not None:
        check_readable(key_name, key)
        said += f" and {key_name}={key}"
    _load(
        # Without a password of ours an encrypted key would have one asked for on the terminal.
        lambda context: context.load_cert_chain(certificate, key, password=lambda: password),
        f"{said}, which are no certificate and key that belong together"
        + (" (an encrypted key needs its password)" if key is not None and _is_encrypted(key) else ""),
    )


def cause(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error behind a driver's own; None where there is none."""
    seen: set[int] = set()
    while error is not None and not isinstance(error, ssl.SSLError):
        # Drivers that raise one exception object twice make a circle of its chain.
        if id(error) in seen:
            return None
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return error


def said(error: ssl.SSLError) -> str:
    """What went wrong, in words: `certificate has expired`, `tlsv13 alert certificate required`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()


def _load(load: Callable[[ssl.SSLContext], None], wrong: str) -> None:
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except (OSError, ValueError):
        # ssl.SSLError is an OSError; its text is OpenSSL's, with a line of its source.
        raise ValueError(wrong) from None


def _is_encrypted(key: str) -> bool:
    with open(key, "rb") as file:
        return b"ENCRYPTED" in file.read(64 * 1024)
