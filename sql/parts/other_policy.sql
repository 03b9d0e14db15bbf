-- Purpose: parked rows that were parked under another RELAY_ON_PARKED, as `t`, locked; part of park_policy and park_policy_next, with
--          their values. Expired and unmarkable rows never hold.
-- Index:   {aside_parked_index}: those of the shards' parked rows that are to be changed.
WITH t AS MATERIALIZED (
        SELECT x.c, x.seq, x.id FROM unnest($1::smallint[]) f(shard) CROSS JOIN LATERAL (
            SELECT o.ctid AS c, o.seq, o.id FROM {table} o
             WHERE {shard_of_o} = f.shard AND o.aside = 'parked' AND o.holds = NOT $2::bool
               AND coalesce(o.failure_class, '') NOT IN ('expired', 'unmarkable')
               AND o.holds <> ($2::bool AND o.aggregate_id IS NOT NULL)
               AND o.seq NOT IN (SELECT unnest($4::bigint[]))
             ORDER BY o.parked_at, o.seq LIMIT $3::int FOR NO KEY UPDATE SKIP LOCKED) x
         LIMIT $3::int)
