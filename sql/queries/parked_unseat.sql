-- Purpose: a promotion that an operator cannot make, for the row is locked or refuses it, is left to the shard's next owner,
--          who looks for such keys (held_keys.sql): the present one is unseated (H3).
-- Values:  $1 types ('' for none) and $2 ids of the keys.
--          Their shards as parts/shard.sql has it.
-- Locks:   the shards' rows, locked FOR UPDATE already.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/parked_table.py.
UPDATE {shard} s SET epoch = s.epoch + 1
 WHERE s.shard IN (SELECT (hashtextextended(k.a COLLATE "C", hashtext(k.t COLLATE "C")) & 63)::smallint
                     FROM unnest($1::text[], $2::text[]) k(t, a))
