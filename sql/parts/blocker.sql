-- Purpose: whether a holding row of its key stands below the row `o`, a row of the fault table holding nothing; part of page,
--          due and test.
-- Index:   {aside_key_index}, one descent; keys are compared by value.
EXISTS (
                SELECT FROM {table} b
                 WHERE hashtextextended((coalesce(b.aggregate_type, '') || chr(31) || b.aggregate_id) COLLATE "C", 0)
                     = hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0)
                   AND b.aside IS NOT NULL AND b.seq < o.seq AND b.holds AND b.aggregate_id = o.aggregate_id
                   AND coalesce(b.aggregate_type, '') = coalesce(o.aggregate_type, '')
                   AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = b.seq AND u.id = b.id) IS NULL))
