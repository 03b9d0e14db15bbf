-- Purpose: the rows that a filter selects, by seq, so many above one: for a list, and to be changed.
-- Values:  $1..$6 as sql/parts/parked.sql, $7 above this seq, $8 rows.
-- Locks:   none.
-- Index:   {aside_key_index} from end to end; so a selection is read in few large parts.
-- Caller:  relay/parked_table.py, in a read-only transaction.
SELECT p.* FROM {parked}
   AND p.seq > $7::bigint
 ORDER BY p.seq LIMIT $8::bigint
