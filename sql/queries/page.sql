-- Purpose: the next rows (R2): which of the listed writers have ended in this very snapshot, and the rows above the
--          lowest of a shard's cursor and their lows; one line of nulls where there is none. Of shards that are this relay's
--          in this snapshot (L8): looked up once, for a join costs a fifth of an empty page.
-- Values:  $1..$5 the list (number, low, xid or null, gone, asked); $6 shards, $7 cursors, each as an array's text, $8 up to which seq (S, or none
--          to read beyond it, R3), $9 rows a shard, $10 up to how many seqs above where a shard begins: what is sent is
--          looked at too, and there may be very much of it; $11 the most bytes of a row that come along; $12 instance; $13 up to which
--          seq to look in any case (S, for a cursor goes there, or none): above it only as far as the sequence has been, so
--          that a poll that finds nothing descends nowhere and costs a third less. {is_blocked}: nothing, or for the shards in $14 whether a row has a blocker (H2).
--          Rows in the fault table are left out, by one probe a row (an EXISTS would read all of that table into a hash).
-- Locks:   none.
-- Index:   {read_index}, one descent a shard; other shapes than this lateral were 10-1,000 times slower.
-- Caller:  relay/outbox.py `page`.
WITH w AS MATERIALIZED (
        SELECT t.i, t.low, t.gone OR (t.xid IS NULL AND t.asked)
               OR (t.xid IS NOT NULL AND pg_visible_in_snapshot(t.xid::text::xid8, pg_current_snapshot())) AS has_ended
          FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bool[], $5::bool[]) t(i, low, xid, gone, asked)),
     e AS MATERIALIZED (
        SELECT array_agg(i) FILTER (WHERE has_ended) AS ended, min(low) FILTER (WHERE has_ended) AS low,
               (SELECT last_value FROM {sequence}) AS drawn
          FROM w)
SELECT e.ended, r.*
  FROM e LEFT JOIN LATERAL (
        SELECT f.shard, {row}{x_is_blocked}
          FROM unnest($6::text::smallint[], $7::text::bigint[]) f(shard, cursor)
         CROSS JOIN LATERAL (
               SELECT {raw}{is_blocked}
                 FROM {table} o
                WHERE least(f.cursor, e.low) < greatest($13::bigint, e.drawn)
                  AND {shard_of_o} = f.shard AND o.aside IS NULL AND o.seq > least(f.cursor, e.low)
                  AND o.seq <= least($8::bigint, least(f.cursor, e.low) + $10::bigint) AND o.sent_at IS NULL
                  AND (NOT (SELECT EXISTS (SELECT FROM {fault}))
                       OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
                ORDER BY o.seq LIMIT $9::int) x
         WHERE f.shard = ANY (ARRAY (SELECT s.shard FROM {shard} s WHERE s.owner = $12::text))) r ON true
