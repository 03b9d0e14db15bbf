-- Forgets what was processed so long ago that no copy can come any more, some of it at a time.
--
-- Values:  $1 consumer, $2 age, $3 how many rows at most.
-- Rights:  SELECT and DELETE (role.sql). No FOR UPDATE, which needs UPDATE: two that forget at once wait for each other
--          a batch long.
-- Locks:   the rows that go.
-- Index:   processed_messages_age (BRIN) finds the old pages, the rows go by ctid.
-- Caller:  relay/inbox/retention.py.
DELETE FROM processed_messages WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM processed_messages
     WHERE consumer_name = $1 AND processed_at < now() - $2::interval
     LIMIT $3))
   -- Once more: in a table that somebody else made, and partitioned, a ctid names a row in each partition.
   AND consumer_name = $1 AND processed_at < now() - $2::interval
