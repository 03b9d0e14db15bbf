"""Rows as the reader hands them on, made in memory: for what is measured without a database."""

from __future__ import annotations

from typing import Any, Final

from relay.message import Row

PAYLOAD: Final = b'{"order_id":"42","note":"' + b"y" * 222 + b'"}'


def made_rows(
    count: int, keys: int = 5_000, rare: dict[str, Any] | None = None, headers: str | None = None
) -> list[Row]:
    """`count` rows of 64 shards and `keys` keys, 250 bytes each, with addresses as a table has them."""
    return [
        Row(
            seq % 64,
            seq,
            f"01K0ORDERCREATED{seq:010d}",
            "order.created",
            ctid=f"({seq // 8},{seq % 8 + 1})",
            aggregate_type="order",
            aggregate_id=str(seq % keys),
            payload=PAYLOAD,
            size=len(PAYLOAD),
            occurred_at=1_764_439_200.123456 + seq / 1000,
            rare=rare,
            headers=headers,
        )
        for seq in range(count)
    ]
