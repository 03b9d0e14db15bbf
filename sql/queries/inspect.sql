-- Purpose: what `run` refuses to work with, and what the leases' floors belong to (R1, R5). S is read after the snapshot is taken, so
--          rows above it are none that were inserted meanwhile; only these are looked for: what was deleted below is not passed over again.
-- Values:  $1 the columns that the relay uses.
-- Locks:   none.
-- Index:   {read_index}, one descent a shard; {aside_key_index}, all of it.
-- Caller:  relay/outbox.py `open`.
SELECT c.relkind = 'p' OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid) AS has_children,
       (SELECT q.seqcache FROM pg_sequence q WHERE q.seqrelid = {sequence_text}::regclass) AS cache,
       (SELECT array_agg(w.name ORDER BY w.name) FROM unnest($1::text[]) w(name)
         WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = w.name AND NOT a.attisdropped)
       ) AS missing_columns,
       greatest((SELECT max(x.seq) FROM generate_series(0, 63) f(shard) CROSS JOIN LATERAL (
                    SELECT o.seq FROM {table} o
                     WHERE {shard_of_o} = f.shard::smallint AND o.aside IS NULL AND o.seq > last.seq
                     ORDER BY o.seq DESC LIMIT 1) x),
                (SELECT max(o.seq) FROM {table} o WHERE o.aside IS NOT NULL AND o.seq > last.seq)) AS max_seq,
       last.seq AS last_seq,
       {fingerprint} AS fingerprint
  FROM pg_class c
 CROSS JOIN (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}) last
 WHERE c.oid = {table_oid}
