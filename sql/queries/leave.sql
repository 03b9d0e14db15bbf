-- Purpose: a relay that stops leaves the membership.
-- Values:  $1 instance.
-- Locks:   the row.
-- Index:   the primary key.
-- Caller:  relay/outbox.py `leave`.
DELETE FROM {relay} WHERE instance = $1::text
