-- Purpose: whether a row `head` of the inbox table may be worked on: the oldest unfinished one of its key, when it is due; part of
--          inbox/0002_mailbox.sql and inbox/mailbox_gauges.sql. One that is held is none of these, and is not looked at.
-- Index:   the one of a key's unfinished rows, one descent. (An EXISTS becomes a join, for which a planner without statistics reads all
--          unfinished rows.)
head.done_at IS NULL AND head.parked_at IS NULL AND NOT head.held AND head.due_at <= now()
       AND (SELECT earlier.seq FROM {table} earlier
             WHERE earlier.aggregate_type = head.aggregate_type AND earlier.aggregate_id = head.aggregate_id
               AND earlier.seq < head.seq AND earlier.done_at IS NULL ORDER BY earlier.seq LIMIT 1) IS NULL
