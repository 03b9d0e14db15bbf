-- Purpose: the shard of an outbox row, a hash of its ordering key, or of its id without one: 0 to 63. No column: one that is
--          generated costs each writer more than all of this. Indexes and statements say it in the same words, which
--          is how the planner finds the index. Without an aggregate_type is the same key as with an empty one.
-- Values:  {of} nothing, or the row's alias and a dot.
(hashtextextended(coalesce({of}aggregate_id, {of}id), hashtext(coalesce({of}aggregate_type, ''))) & 63)::smallint
