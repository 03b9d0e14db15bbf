-- Purpose: what an operator's filter selects, as `p`: parked rows, and the rows of the fault table (published, but their
--          mark fails), which may have lost their outbox row. `is_expired`: the next publish would park it again at once
--          (by the time of $6, so that a count and what is selected after it agree).
-- Values:  $1 event types, $2 keys (aggregate_id, or type/id), $3 classes or parts of the error's text, $4 ids (each an
--          array or null: any), $5 parked since, or null, $6 parked until.
(SELECT o.seq, o.id, {shard_of_o} AS shard, o.event_type, o.aggregate_type, o.aggregate_id, o.attempts,
        coalesce(o.failure_class, 'unknown') AS failure_class, o.failure_error,
        coalesce(o.parked_at, o.last_failed_at) AS parked_at,
        coalesce(o.failure_class = 'expired' OR o.expires_at <= $6::timestamptz, false) AS is_expired,
        false AS is_fault
   FROM {table} o
  WHERE o.aside IS NOT NULL AND o.aside = 'parked' AND o.sent_at IS NULL
    AND NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id)
  UNION ALL
 SELECT u.seq, u.id, {shard_of_o} AS shard, o.event_type, o.aggregate_type, o.aggregate_id, u.attempts,
        u.failure_class, u.failure_error, u.failed_at, false, true
   FROM {fault} u LEFT JOIN {table} o ON o.id = u.id AND o.seq = u.seq) p
 WHERE ($1::text[] IS NULL OR p.event_type = ANY ($1))
   AND ($2::text[] IS NULL OR p.aggregate_id = ANY ($2) OR p.aggregate_type || '/' || p.aggregate_id = ANY ($2))
   AND ($3::text[] IS NULL OR EXISTS (
        SELECT FROM unnest($3) e(text)
         WHERE p.failure_class = e.text OR position(lower(e.text) IN lower(p.failure_error)) > 0))
   AND ($4::text[] IS NULL OR p.id = ANY ($4))
   AND ($5::timestamptz IS NULL OR p.parked_at >= $5)
   AND (p.parked_at IS NULL OR p.parked_at <= $6::timestamptz)
