"""What `relay check` says of connections that leave the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.config import load
from relay.preflight import encryption
from relay.preflight.finding import Level
from tests.authority import Authority

LOCAL = {"RELAY_DATABASE_URL": "postgresql://u:s3cret@127.0.0.1/d", "RELAY_AMQP_URL": "amqp://u:s3cret@localhost/"}


def said(**urls: str) -> list[str]:
    """The warnings; none where one line says that all is well."""
    config, _ = load(LOCAL | {f"RELAY_{name.upper()}": value for name, value in urls.items()})
    found = encryption.check(config)
    assert {finding.check for finding in found} == {"encryption"}
    assert all("s3cret" not in finding.text + (finding.mend or "") for finding in found)
    levels = {finding.level for finding in found}
    assert levels in ({Level.OK}, {Level.WARNING})
    return [finding.text for finding in found if finding.level is Level.WARNING]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@[::1]:5432/d",
        "postgresql://u:s3cret@/d?host=/run/postgresql",
        "postgresql://u:s3cret@%2Frun%2Fpostgresql/d",
        "postgresql://u:s3cret@127.0.0.1,localhost/d?sslmode=disable",
    ],
)
def test_what_stays_on_the_machine_needs_none(url: str) -> None:
    assert said(database_url=url) == []


@pytest.mark.parametrize(
    ("url", "warning"),
    [
        ("postgresql://u:s3cret@db/d", "db/d: sslmode=prefer, so it may go unencrypted"),
        ("postgresql://u:s3cret@127.0.0.1,db:5433/d?sslmode=disable", "127.0.0.1,db:5433/d: sslmode=disable"),
        ("postgresql://u:s3cret@10.0.0.1/d?sslmode=require", "so the name in the server's certificate is not checked"),
        ("postgresql://u:s3cret@/d?host=db&sslmode=allow", "db/d: sslmode=allow"),
    ],
)
def test_a_database_elsewhere(url: str, warning: str) -> None:
    (found,) = said(database_url=url)
    assert warning in found


@pytest.mark.parametrize("url", ["postgresql:///d", "postgresql://u@/d", "postgresql://u:s3cret@/d?sslmode=require"])
def test_a_database_that_the_environment_may_name(url: str) -> None:
    config, _ = load(LOCAL | {"RELAY_DATABASE_URL": url})
    (found,) = encryption.check(config)
    assert (found.level, "PGHOST" in found.text) == (Level.NOT_CHECKED, True)
    assert "s3cret" not in found.text


def test_a_broker_elsewhere(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    assert said(amqp_url="amqp://u:s3cret@mq1/,amqp://u:s3cret@mq2:5673/") == [
        "mq1/%2F: not encrypted",
        "mq2:5673/%2F: not encrypted",
    ]
    assert said(amqp_url="amqps://u:s3cret@mq/?no_verify_ssl=1") == [
        "mq/%2F: no_verify_ssl=1, so any certificate will do"
    ]
    assert said(amqp_url=f"amqps://u:s3cret@mq/?cafile={authority.file}") == []
    assert said(amqp_url="amqps://u:s3cret@mq/") == []


def test_checked_and_encrypted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    url = f"postgresql://u:s3cret@db/d?sslmode=verify-full&sslrootcert={authority.file}"
    assert said(database_url=url) == []
    assert said(database_url=url, sink="file", sink_path="-") == [], "no broker, nothing to say of one"


def test_a_url_that_is_gone_is_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(LOCAL["RELAY_DATABASE_URL"])
    config, _ = load({"RELAY_DATABASE_URL_FILE": str(file), "RELAY_AMQP_URL": LOCAL["RELAY_AMQP_URL"]})
    file.unlink()
    assert [finding.level for finding in encryption.check(config)] == [Level.NOT_CHECKED]
