-- What an application's role needs to write events: INSERT on the writers' columns, and nothing else.
--
-- Rights:  an identity column needs no right on its sequence; the relay's columns stay out of reach; nothing
--          can be read back, so neither RETURNING nor ON CONFLICT (id) works for such a role.
-- Locks:   none beyond the catalog's rows.
-- Caller:  the last step, through block.sql; {writer} is the quoted name.
IF NOT has_schema_privilege({writer_text}, home, 'USAGE') THEN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', home, {writer_text});
END IF;
GRANT INSERT (id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload, content_type,
              content_encoding, headers, exchange, routing_key, correlation_id, causation_id, producer, traceparent,
              tracestate, priority, expires_at, mandatory, available_at, occurred_at, created_at)
    ON {table} TO {writer};
