-- How much waits: unfinished rows up to $1, the age of the oldest, how many of them are parked, and since when the one that
-- is next may be worked on ({claimable} is parts/claimable.sql).
--
-- Values:  $1 where the count ends.
-- Locks:   none.
-- Index:   the two partial ones over unfinished rows.
-- Caller:  relay/inbox/mailbox.py, every few seconds.
SELECT count(*) AS pending,
       coalesce(extract(epoch FROM now() - min(received_at)), 0)::float8 AS oldest_age_s,
       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked,
       coalesce((SELECT extract(epoch FROM now() - head.due_at) FROM {table} head
                  WHERE {claimable}
                  ORDER BY head.seq LIMIT 1), 0)::float8 AS due_age_s
  FROM (SELECT received_at, parked_at FROM {table} WHERE done_at IS NULL LIMIT $1) waiting
