-- The least that `relay run` and the operator's commands need, for one role.
--
-- Rights:  rows are read, marked (the relay's own columns only, which includes locking them) and deleted,
--          never inserted or rewritten, but for `expires_at`, which `parked redrive --ignore-expiry` clears;
--          leases, members and faults are the relays' own.
-- Locks:   none beyond the catalog's rows.
-- Caller:  the last step, through block.sql; {role} is the quoted name.
IF NOT has_schema_privilege({role_text}, home, 'USAGE') THEN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', home, {role_text});
END IF;
GRANT SELECT, DELETE ON {table} TO {role};
GRANT UPDATE (sent_at, due_at, expires_at, first_failed_at, last_failed_at, parked_at, attempts, holds, aside, failure_class,
              failure_error, failure_exchange, failure_routing_key, failure_relay, failure_relay_version)
    ON {table} TO {role};
GRANT SELECT ON SEQUENCE {sequence} TO {role};
GRANT SELECT, UPDATE ON {shard} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {relay}, {fault} TO {role};
GRANT SELECT, UPDATE (paused_at, paused_by) ON {meta} TO {role};
GRANT EXECUTE ON FUNCTION {bell_wait}(int) TO {role};
