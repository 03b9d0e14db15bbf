-- Purpose: whether the sequence has fallen behind the rows (a restore without it, a subscriber, setval): then new rows
--          would get numbers that are taken.
-- Locks:   none.
-- Index:   the reading index, one probe a shard; the index of rows aside by key.
-- Caller:  relay/preflight/database.py.
SELECT (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {sequence}) AS last_seq,
       greatest((SELECT max(o.seq) FROM {shard} s CROSS JOIN LATERAL (
                    SELECT seq FROM {table} o WHERE {shard_of_o} = s.shard AND o.aside IS NULL
                    ORDER BY o.seq DESC LIMIT 1) o),
                (SELECT max(seq) FROM {table} WHERE aside IS NOT NULL)) AS newest_row
