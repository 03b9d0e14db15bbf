-- Purpose: the rows that a filter selects, by seq, so many above one: for a list, and to be changed.
-- Values:  $1..$6 as sql/parts/parked.sql, $7 above this seq, $8 rows, $9 whether those past their deadline too.
-- Locks:   none.
-- Index:   {aside_key_index} from end to end; so a selection is read in few large parts.
-- Caller:  relay/parked_table.py, in a read-only transaction.
SELECT p.* FROM {parked}
   AND p.seq > $7::bigint AND ($9::bool OR NOT p.is_expired)
 ORDER BY p.seq LIMIT $8::bigint
