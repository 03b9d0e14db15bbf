-- Rows that are held by nobody: the first that is held of each key, where no unfinished one is before it, and those behind it. A batch
-- was written while those before it were being finished, or somebody deleted them by hand.
--
-- Locks:   the rows.
-- Index:   the one over held rows, one descent a key; the one of a key's unfinished rows, one descent each.
-- Caller:  relay/inbox/mailbox.py, every few seconds.
WITH RECURSIVE key AS (
        (SELECT t.aggregate_type, t.aggregate_id, t.seq FROM {table} t WHERE t.done_at IS NULL AND t.held
          ORDER BY t.aggregate_type, t.aggregate_id, t.seq LIMIT 1)
        UNION ALL
        SELECT next.*
          FROM key CROSS JOIN LATERAL (
               SELECT t.aggregate_type, t.aggregate_id, t.seq FROM {table} t
                WHERE t.done_at IS NULL AND t.held AND (t.aggregate_type, t.aggregate_id) > (key.aggregate_type, key.aggregate_id)
                ORDER BY t.aggregate_type, t.aggregate_id, t.seq LIMIT 1) next),
     free AS MATERIALIZED (
        SELECT later.message_id
          FROM key CROSS JOIN LATERAL (
               SELECT t.message_id FROM {table} t
                WHERE t.aggregate_type = key.aggregate_type AND t.aggregate_id = key.aggregate_id AND t.done_at IS NULL
                  AND t.seq >= key.seq ORDER BY t.seq LIMIT {free_rows}) later
         WHERE (SELECT earlier.seq FROM {table} earlier
                 WHERE earlier.aggregate_type = key.aggregate_type AND earlier.aggregate_id = key.aggregate_id
                   AND earlier.seq < key.seq AND earlier.done_at IS NULL ORDER BY earlier.seq LIMIT 1) IS NULL)
UPDATE {table} SET held = false WHERE held AND message_id IN (SELECT message_id FROM free)
