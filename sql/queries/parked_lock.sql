-- Purpose: lock the shards of the rows that an operator changes (O1).
-- Values:  $1 shards.
-- Locks:   FOR UPDATE on the shard rows, in shard order: excludes settlements, claims and renewals.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/parked_table.py.
SELECT s.shard FROM {shard} s WHERE s.shard = ANY ($1::smallint[]) ORDER BY s.shard FOR UPDATE
