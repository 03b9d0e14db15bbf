"""Values of settings: durations, sizes, names, templates, addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("5s", 5), ("2m", 120), ("1h", 3600), ("7d", 604800), ("1.5s", 1.5), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert values.duration(text) == seconds


@pytest.mark.parametrize("text", ["5", "5 s", "s", "-1s", "1h30m", "١s", "1e3s", "5S", "99999d", "inf", "nans"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError):
        values.duration(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("64KiB", 65536), ("1MiB", 2**20), ("2GiB", 2**31), ("250", 250), ("7B", 7)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert values.size(text) == size_bytes


@given(st.text(st.characters(exclude_categories=())))
def test_utf8_is_what_encodes_and_has_no_zero_byte(text: str) -> None:
    try:
        is_text = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_text = False
    if is_text:
        assert values.utf8(text) == text
    else:
        with pytest.raises(ValueError, match=r"^(not UTF-8|has a zero byte)$"):
            values.utf8(text)


@pytest.mark.parametrize("text", ["64KB", "1 MiB", "0", "-1", "1.5MiB", "", "9999999999999GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        values.size(text)


@pytest.mark.parametrize(
    ("text", "quoted", "shard"),
    [
        ("outbox", '"outbox"', '"outbox_shard"'),
        ("Sales.Outbox", '"sales"."outbox"', '"sales"."outbox_shard"'),
        ('"My Schema"."Out""box"', '"My Schema"."Out""box"', '"My Schema"."Out""box_shard"'),
        ('"a.b".c', '"a.b"."c"', '"a.b"."c_shard"'),
        ("events_é$1", '"events_é$1"', '"events_é$1_shard"'),
    ],
)
def test_table_names_as_sql_reads_them(text: str, quoted: str, shard: str) -> None:
    name = values.table_name(text)
    assert (name.quoted, name.derived("_shard")) == (quoted, shard)


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a;drop", "a.b.c", ".a", "a.", '"a', '""', "1a", "a-b", "x" * 44, "é" * 22, "x" * 64 + ".a"],
)
def test_no_table_names(text: str) -> None:
    with pytest.raises(ValueError):
        values.table_name(text)


@given(st.text(min_size=1, max_size=10).filter(lambda text: "\0" not in text))
def test_any_quoted_name_survives(name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    assert values.table_name(quoted) == values.TableName(None, name)


@pytest.mark.parametrize(
    "text", ["events", "{aggregate_type}", "a.{event_type}.v{schema_version}", "{{x}}", "{id}{producer}"]
)
def test_templates(text: str) -> None:
    assert values.template(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "{payload}",
        "{",
        "}",
        "{event_type",
        "{}",
        "{0}",
        "{event_type!r}",
        "{event_type:>5}",
        "{event_type.x}",
        "a\nb",
        "x" * 256,
    ],
)
def test_no_templates(text: str) -> None:
    with pytest.raises(ValueError):
        values.template(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("0.0.0.0:9761", "0.0.0.0", 9761),
        (":9761", "0.0.0.0", 9761),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("localhost:80", "localhost", 80),
    ],
)
def test_listen_addresses(text: str, host: str, port: int) -> None:
    assert values.listen_address(text) == values.ListenAddress(host, port)


@pytest.mark.parametrize(
    "text", ["9761", "host", "::1:80", "h:99999", "h:", "http://h:1", "a b:1", "h:1/", "0.0.0..0:1", f"{'x' * 64}:1"]
)
def test_no_listen_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        values.listen_address(text)
