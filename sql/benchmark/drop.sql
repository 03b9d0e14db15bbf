-- Purpose: takes away an outbox with everything of it; only ever one that `relay bench` has made.
-- Values:  none. What a migration that was cut short did not make is passed over.
-- Locks:   ACCESS EXCLUSIVE on the five tables, within the lock_timeout.
-- Index:   none.
-- Caller:  relay/benchmark/ground.py, as one simple query. The timeout is the transaction's own: a pooling proxy would
--          hand a session's to others.
BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL lock_timeout = '10s';
DROP TABLE IF EXISTS {table}, {shard}, {relay}, {fault}, {meta};
DROP FUNCTION IF EXISTS {ring}(), {bell_wait}(int);
COMMIT;
