-- Purpose: the rows of the fault table past the retention of parked rows, oldest first: those of these shards, and those
--          whose outbox row is gone (O2).
-- Values:  $1 shards, $2 retention in seconds, $3 rows in all, $4 seqs that are left alone, for the database refuses it.
-- Locks:   none; under the shards' locks.
-- Index:   the primary key a row; the fault table end to end.
-- Caller:  relay/retention.py.
SELECT {shard_of_o} AS shard, u.seq, u.id FROM {fault} u LEFT JOIN {table} o ON o.id = u.id AND o.seq = u.seq
 WHERE u.failed_at < statement_timestamp() - $2::float8 * interval '1 second' AND u.seq NOT IN (SELECT unnest($4::bigint[]))
   AND ({shard_of_o} IS NULL OR {shard_of_o} = ANY ($1::smallint[]))
 ORDER BY u.failed_at, u.seq LIMIT $3::int
