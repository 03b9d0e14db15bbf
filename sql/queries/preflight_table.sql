-- Purpose: what `relay check` asks of an outbox: rights, identity, children, trigger, indexes, row security.
-- Locks:   none.
-- Index:   catalogs only.
-- Caller:  relay/preflight/database.py. $1 the table's oid.
SELECT pg_backend_pid() AS pid,
       current_setting('max_prepared_transactions')::int AS prepared_max,
       c.relkind::text AS kind,
       row_security_active(c.oid) AS hides_rows,
       c.reloptions::text[] AS options,
       (SELECT count(*) FROM pg_inherits WHERE inhparent = c.oid) AS children,
       (SELECT attidentity::text FROM pg_attribute WHERE attrelid = c.oid AND attname = 'seq') AS identity,
       (SELECT seqcache FROM pg_sequence WHERE seqrelid = to_regclass({sequence_text})) AS cache,
       (SELECT tgenabled::text FROM pg_trigger
        WHERE tgrelid = c.oid AND NOT tgisinternal AND tgfoid = to_regproc({ring_text})) AS trigger,
       (SELECT count(*) FROM {shard}) AS shards,
       (SELECT bool_and(indisvalid) AND count(*) = 4 FROM pg_index
        WHERE indexrelid IN (to_regclass({read_text}), to_regclass({aside_key_text}), to_regclass({aside_due_text}),
                                                                           to_regclass({aside_parked_text}))
       ) AS has_indexes,
       -- A mark changes sent_at: with an index on it no mark is HOT.
       (SELECT array_agg(i.indexrelid::regclass::text) FROM pg_index i
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'sent_at'
        WHERE i.indrelid = c.oid AND (a.attnum = ANY (i.indkey) OR pg_get_expr(i.indpred, c.oid) LIKE '%sent_at%'
                                      OR pg_get_expr(i.indexprs, c.oid) LIKE '%sent_at%')) AS sent_at_indexes,
       (SELECT array_agg(what) FROM (VALUES
            ('SELECT on {table}', has_table_privilege(c.oid, 'SELECT')),
            ('DELETE on {table}', has_table_privilege(c.oid, 'DELETE')),
            ('UPDATE (sent_at, ...) on {table}',
             (SELECT bool_and(has_column_privilege(c.oid, n, 'UPDATE')) FROM unnest(ARRAY[
                  'sent_at', 'due_at', 'expires_at', 'first_failed_at', 'last_failed_at', 'parked_at', 'attempts', 'holds',
                  'aside', 'failure_class', 'failure_error', 'failure_exchange', 'failure_routing_key', 'failure_relay',
                  'failure_relay_version']) n)),
            ('SELECT on {sequence}', has_sequence_privilege({sequence_text}, 'SELECT')),
            ('SELECT, UPDATE on {shard}',
             has_table_privilege({shard_text}, 'SELECT') AND has_table_privilege({shard_text}, 'UPDATE')),
            ('SELECT, INSERT, UPDATE, DELETE on {relay}',
             has_table_privilege({relay_text}, 'SELECT') AND has_table_privilege({relay_text}, 'INSERT')
             AND has_table_privilege({relay_text}, 'UPDATE') AND has_table_privilege({relay_text}, 'DELETE')),
            ('SELECT, INSERT, UPDATE, DELETE on {fault}',
             has_table_privilege({fault_text}, 'SELECT') AND has_table_privilege({fault_text}, 'INSERT')
             AND has_table_privilege({fault_text}, 'UPDATE') AND has_table_privilege({fault_text}, 'DELETE')),
            ('EXECUTE on {bell_wait}', has_function_privilege(to_regproc({bell_wait_text})::oid, 'EXECUTE'))
        ) t(what, has_it) WHERE NOT has_it) AS missing_rights
FROM pg_class c WHERE c.oid = $1
