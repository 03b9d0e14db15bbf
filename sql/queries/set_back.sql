-- Purpose: failed rows become deferred or parked, with what is known of the failure (H1); which were unchanged.
-- Values:  $1 ctids, $2 seqs, $3 ids, each as an array's text, $4 aside, $5 holds, $6 delays in seconds, $7 attempts, $8 reasons, $9 errors,
--          $10 exchanges, $11 routing keys, $12 relay's name, $13 its version.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows.
-- Index:   none, by address: a miss means that somebody changed the row, or keeps it locked: unchanged.sql tells (S2).
-- Caller:  relay/settling.py.
WITH t AS (
        SELECT o.ctid AS c, k.*, clock_timestamp() AS failed_at
          FROM unnest($1::text::tid[], $2::text::bigint[], $3::text::text[], $4::text[], $5::bool[], $6::float8[], $7::int[],
                $8::text[], $9::text[], $10::text[], $11::text[])
                k(k_ctid, seq, id, aside, holds, delay_s, attempts, reason, error, exchange, routing_key)
          JOIN {table} o ON o.ctid = k.k_ctid
         WHERE o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (UPDATE {table} o
              SET aside = t.aside, holds = t.holds, attempts = t.attempts,
                  due_at = CASE WHEN t.aside = 'deferred' THEN t.failed_at + t.delay_s * interval '1 second' END,
                  parked_at = CASE WHEN t.aside = 'parked' THEN t.failed_at END,
                  -- Nacks and silence are the broker's fault: the row did not fail.
                  first_failed_at = CASE WHEN t.reason IN ('nacked', 'unanswered') THEN o.first_failed_at
                                         ELSE coalesce(o.first_failed_at, t.failed_at) END,
                  last_failed_at = t.failed_at,
                  failure_class = nullif(t.reason, ''), failure_error = nullif(t.error, ''),
                  failure_exchange = t.exchange, failure_routing_key = t.routing_key,
                  failure_relay = $12::text, failure_relay_version = $13::text
             FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq)
SELECT array_agg(u.seq) FILTER (WHERE u.seq IS NOT NULL) AS seqs, array_agg(t.seq) FILTER (WHERE u.seq IS NULL) AS untouched
  FROM t LEFT JOIN u ON u.seq = t.seq
