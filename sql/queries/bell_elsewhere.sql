-- Purpose: whether another session has the doorbell's lock: every insert then rings already. One that only waits for it
--          may give up, and then nothing rings.
-- Values:  $1 our session's pid.
-- Locks:   none.
-- Index:   none; one pass over the lock table.
-- Caller:  relay/outbox.py `arm`.
SELECT EXISTS (SELECT FROM pg_lock_status() l
                WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.database = {database_oid}
                  AND l.classid = {bell_class} AND l.objid = {bell_object} AND l.objsubid = 2
                  AND l.granted AND l.pid <> $1::int) AS is_elsewhere
