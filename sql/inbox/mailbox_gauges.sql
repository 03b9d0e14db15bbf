-- How much waits: unfinished rows up to $1, the age of the oldest, and how many of them are parked.
--
-- Values:  $1 where the count ends.
-- Locks:   none.
-- Index:   the two partial ones over unfinished rows.
-- Caller:  relay/inbox/mailbox.py, every few seconds.
SELECT count(*) AS pending,
       coalesce(extract(epoch FROM now() - min(received_at)), 0)::float8 AS oldest_age_s,
       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked
  FROM (SELECT received_at, parked_at FROM {table} WHERE done_at IS NULL LIMIT $1) waiting
