-- Purpose: S, and then the open writers of the table (R1), as `vxid|xid` with the 32-bit xid or nothing; the relays' own
--          transactions carry their sign and are left out. Of a writer with subtransactions the oldest xid is its own: by age,
--          for where the 32 bits have just wrapped the lowest number is another one. The order is forced by data: the locks
--          are read in a lateral part that needs S.
-- Locks:   none.
-- Index:   none; one pass over the lock table.
-- Caller:  relay/outbox.py `check`, five to twenty times a second under traffic.
WITH s AS MATERIALIZED (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence})
SELECT s.seq, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xmax,
       date_part('epoch', clock_timestamp()) AS now,
       (SELECT array_agg(w.vxid || '|' || coalesce(w.xid, '')) FROM (
            SELECT l.virtualtransaction AS vxid,
                   (array_agg(l.transactionid ORDER BY age(l.transactionid) DESC)
                        FILTER (WHERE l.locktype = 'transactionid'))[1]::text AS xid
              FROM pg_lock_status() l
             WHERE s.seq IS NOT NULL AND l.granted
               AND (l.locktype = 'relation' AND l.database = {database_oid} AND l.relation = {table_oid}
                        AND l.mode = 'RowExclusiveLock'
                    OR l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
                    OR l.locktype = 'advisory' AND l.database = {database_oid} AND l.classid = {sign_class}
                        AND l.objid = {sign_object} AND l.objsubid = 2)
             GROUP BY 1
            HAVING bool_or(l.locktype = 'relation') AND NOT bool_or(l.locktype = 'advisory')) w) AS writers
  FROM s
