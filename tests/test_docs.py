"""The pages cannot drift from the tables they are printed from."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay import config, metrics

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("file", "page", "module"),
    [("configuration.md", config.page, "relay.config"), ("metrics.md", metrics.page, "relay.metrics")],
)
def test_a_printed_page_is_up_to_date(file: str, page: object, module: str) -> None:
    assert callable(page)
    assert (DOCS / file).read_text() == page(), f"print it again: python -m {module} > docs/{file}"


def test_every_setting_is_documented() -> None:
    text = (DOCS / "configuration.md").read_text()
    for setting in config.SETTINGS:
        assert f"| `{setting.variable}` |" in text
        assert setting.meaning in text
        if setting.is_secret:
            assert f"`{setting.variable}_FILE`" in text


def test_every_metric_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    for metric in metrics.METRICS:
        assert f"| `{metric.name}` |" in text
        assert metric.help in text
