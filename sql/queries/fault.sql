-- Purpose: rows that the database lets nobody change any more are recorded beside the outbox: published or not, they are
--          left alone from now on.
-- Values:  $1 seqs, $2 ids, $3 errors, $4 attempts, $5 exchanges, $6 routing keys (null where not known), $7 relay's name,
--          $8 its version.
-- Locks:   the new rows, under their shards' locks.
-- Index:   the primary key.
-- Caller:  relay/settling.py, after a refusal.
INSERT INTO {fault} (seq, id, failure_class, failure_error, attempts, exchange, routing_key, relay, relay_version, failed_at)
SELECT k.*, $7::text, $8::text, clock_timestamp()
  FROM (SELECT k.seq, k.id, 'unmarkable', k.error, k.attempts, k.exchange, k.routing_key
          FROM unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::text[], $6::text[])
               k(seq, id, error, attempts, exchange, routing_key)) k
    ON CONFLICT (seq, id) DO UPDATE
   SET failure_error = excluded.failure_error, attempts = excluded.attempts, exchange = excluded.exchange,
       routing_key = excluded.routing_key, relay = excluded.relay, relay_version = excluded.relay_version,
       failed_at = excluded.failed_at
