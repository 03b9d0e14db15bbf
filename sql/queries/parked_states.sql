-- Purpose: the state of each id, in the contract's words, `unknown id` where there is no row: in the order asked for.
-- Values:  $1 ids.
-- Locks:   none.
-- Index:   the primary key.
-- Caller:  relay/parked_table.py.
SELECT k.id,
       CASE WHEN EXISTS (SELECT FROM {fault} u WHERE u.id = k.id AND u.seq = coalesce(o.seq, u.seq)) THEN 'unmarkable'
            WHEN o.seq IS NULL THEN 'unknown id'
            WHEN o.sent_at IS NOT NULL THEN 'sent'
            WHEN o.aside IS NOT NULL THEN o.aside
            WHEN o.available_at > statement_timestamp() THEN 'scheduled'
            ELSE 'pending' END AS state
  FROM unnest($1::text[]) WITH ORDINALITY k(id, n)
  LEFT JOIN LATERAL (SELECT x.seq, x.sent_at, x.aside, x.available_at FROM {table} x WHERE x.id = k.id LIMIT 1) o ON true
 ORDER BY k.n
