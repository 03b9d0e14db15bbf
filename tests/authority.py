"""A certificate authority of the test's own, and what it signs."""

from __future__ import annotations

import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


class Authority:
    """Signs certificates into files of `directory`; `file` is its own."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._authority = trustme.CA(organization_name=name)
        self.file = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def sign(self, *hosts: str, name: str = "", has_expired: bool = False) -> tuple[Path, Path]:
        """(certificate, key) of a server with those names and addresses, or of a client whose common name is `name`."""
        expires = datetime.now(UTC) + timedelta(days=-1 if has_expired else 1)
        leaf = self._authority.issue_cert(*(hosts or ("client.test",)), common_name=name or None, not_after=expires)
        stem = f"{self.file.stem}-{'-'.join((name, *hosts))}{'-expired' if has_expired else ''}"
        certificate, key = self._directory / f"{stem}.pem", self._directory / f"{stem}.key"
        for number, part in enumerate(leaf.cert_chain_pems):
            part.write_to_path(str(certificate), append=number > 0)
        leaf.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return certificate, key

    def server_context(self, *hosts: str, has_expired: bool = False) -> ssl.SSLContext:
        """For a server of the test's own."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.sign(*hosts, has_expired=has_expired))
        return context


def give(source: Path, target: Path, owner: Path) -> None:
    """Copy a file to where a server's own user may read it: that of `owner`."""
    shutil.copyfile(source, target)
    target.chmod(0o600)
    stat = owner.stat()
    shutil.chown(target, stat.st_uid, stat.st_gid)
