-- Purpose: whether a row `o` of the shard `f` is aside and its time has come, at or below the cursor; part of queries/due.sql, with
--          its values.
-- Index:   {aside_due_index}.
{shard_of_o} = f.shard AND o.aside IN ('deferred', 'scheduled') AND o.due_at <= statement_timestamp()
               AND o.seq <= f.cursor AND o.sent_at IS NULL AND o.seq NOT IN (SELECT unnest($6::bigint[]))
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
