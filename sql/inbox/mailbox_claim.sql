-- Takes the right to write this queue into this table: where nobody has it, where it ran out, where its owner's session is
-- gone, and by its owner again. Two writers at a time would mix up the order.
--
-- Values:  $1 queue, $2 owner, $3 for how long, $4 whether the session is direct (behind a proxy its pid means nothing).
-- Says:    INSERT 0 1, or INSERT 0 0 where another one has it.
-- Locks:   the queue's row: it waits for the owner's transaction that writes.
-- Index:   the primary key.
-- Caller:  relay/inbox/mailbox.py, before anything is consumed.
INSERT INTO {writer} AS held (queue, owner, owner_pid, owner_began, leased_until)
SELECT $1, $2, CASE WHEN $4 THEN me.pid END, CASE WHEN $4 THEN me.backend_start END, clock_timestamp() + $3::interval
  FROM pg_stat_get_activity(pg_backend_pid()) me
ON CONFLICT (queue) DO UPDATE
   SET owner = excluded.owner, owner_pid = excluded.owner_pid, owner_began = excluded.owner_began,
       leased_until = excluded.leased_until
 WHERE held.owner = excluded.owner OR held.leased_until < clock_timestamp()
    OR held.owner_pid IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_stat_get_activity(held.owner_pid) a
         WHERE a.backend_start IS NULL OR held.owner_began IS NULL OR a.backend_start = held.owner_began)
