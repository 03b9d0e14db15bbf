-- Purpose: how many rows a filter selects, by class.
-- Values:  as sql/parts/parked.sql.
-- Locks:   none.
-- Index:   {aside_key_index} from end to end: all rows aside are looked at; a million take seconds.
-- Caller:  relay/parked_table.py, in a read-only transaction.
SELECT p.failure_class, count(*) AS rows, count(*) FILTER (WHERE p.is_expired) AS expired
  FROM {parked}
 GROUP BY 1 ORDER BY 1
