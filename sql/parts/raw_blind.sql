-- Purpose: raw.sql without a look into any value that may be large: of a row whose json has no text (PostgreSQL makes none above
--          1 GB) or whose stored value is damaged, PostgreSQL would refuse the statement, and with it all the others that it brings.
--          Body, headers and `rare` stay behind, but for the time before which the row may not go.
--          The size is a guess: how large a json value is, or a compressed one, only a look into it would tell.
-- Values:  none.
o.ctid, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id,
NULL::text AS payload,
10 * (coalesce(pg_column_size(o.payload), 0)::bigint + coalesce(pg_column_size(o.headers), 0)) AS body_size,
o.occurred_at, o.created_at, o.available_at,
'{"available_at":' || to_json(date_part('epoch', o.available_at)) || '}' AS rare, NULL::text AS headers, o.attempts
