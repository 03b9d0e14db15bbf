-- Purpose: pause, faults and the doorbell, for `relay status`. `is_armed`: an idle relay holds the doorbell's lock,
--          so that every insert rings.
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/admin.py, in a read-only transaction.
SELECT m.paused_at, m.paused_by, m.has_doorbell,
       (SELECT count(*) FROM {fault}) AS unmarkable_rows,
       EXISTS (SELECT FROM pg_locks l
               WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ExclusiveLock' AND l.objsubid = 2
                 AND l.classid::bigint = m.bell_classid::bigint & 4294967295
                 AND l.objid::bigint = m.bell_objid::bigint & 4294967295
                 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS is_armed
FROM {meta} m
