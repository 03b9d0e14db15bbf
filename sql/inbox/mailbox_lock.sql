-- Whether this session is the one that writes this queue into this table, until it ends: two would mix up the order.
--
-- Values:  $1 the table as regclass text, $2 queue.
-- Locks:   a session's advisory lock.
-- Caller:  relay/inbox/mailbox.py, before anything is consumed.
SELECT pg_try_advisory_lock(hashtextextended('outbox-relay inbox ' || $1::regclass::oid::text || ' ' || $2, 0))
