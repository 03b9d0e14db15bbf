-- Deletes what was done longer ago than any copy can still come, some of it at a time.
--
-- Values:  $1 age, $2 how many rows at most.
-- Locks:   the rows that go; one that somebody has locked is left for the next time.
-- Index:   the one on done_at.
-- Caller:  relay/inbox/retention.py.
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {table} WHERE done_at < now() - $1::interval ORDER BY done_at LIMIT $2 FOR UPDATE SKIP LOCKED))
