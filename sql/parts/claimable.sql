-- Purpose: whether a row `head` of the inbox table may be worked on: the oldest unfinished one of its key, when it is due; part of
--          inbox/0002_mailbox.sql and inbox/mailbox_gauges.sql.
-- Index:   the one of a key's unfinished rows, one descent.
head.done_at IS NULL AND head.parked_at IS NULL AND head.due_at <= now()
       AND NOT EXISTS (SELECT FROM {table} earlier
                        WHERE earlier.aggregate_type = head.aggregate_type
                          AND earlier.aggregate_id = head.aggregate_id
                          AND earlier.seq < head.seq AND earlier.done_at IS NULL)
