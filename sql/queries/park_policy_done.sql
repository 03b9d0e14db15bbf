-- Purpose: all parked rows of these shards, ours, have this owner's policy from now on.
-- Values:  $1 shards, $2 instance, $3 whether parked rows hold.
-- Locks:   the shard rows, as an UPDATE does.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/outbox.py `apply_policy`.
UPDATE {shard} s SET parked_hold = $3::bool WHERE s.shard = ANY ($1::smallint[]) AND s.owner = $2::text
