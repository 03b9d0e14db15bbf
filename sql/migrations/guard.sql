-- May this schema be created or upgraded, and do the named roles exist?
--
-- Locks:   none.
-- Caller:  every step, through block.sql, whose variables it reads: known_version is 0 where there is no schema.
-- Values:  {payload_text} {role_text} {writer_text} string literals, NULL where not asked for; {all_names_text}
--          {function_names_text} {companions_text} arrays of the names that 0001 takes; {latest} the newest version that this relay knows.
-- Errors:  RLY01 foreign objects, RLY02 schema too new, RLY03 another payload type, RLY04 no such role,
--          RLY05 no such schema, RLY06 no right to create.
IF known_version = 0 THEN
    IF home IS NULL OR NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = home) THEN
        RAISE EXCEPTION 'the schema % does not exist', coalesce(quote_ident(home), 'of the search_path')
            USING ERRCODE = 'RLY05', HINT = 'create it first, or name another one in RELAY_TABLE';
    END IF;
    SELECT string_agg(format('%s %I', CASE c.relkind WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view'
                                      WHEN 'S' THEN 'sequence' WHEN 'f' THEN 'foreign table'
                                      WHEN 'i' THEN 'index' WHEN 'c' THEN 'type'
                                      ELSE 'table' END, c.relname)
                      || coalesce(' (' || (SELECT string_agg(a.attname, ', ' ORDER BY a.attnum) FROM pg_attribute a
                                           WHERE a.attrelid = c.oid AND a.attnum BETWEEN 1 AND 8
                                           AND NOT a.attisdropped AND c.relkind <> 'i') || ')', ''),
                      '; ' ORDER BY c.relname)
      INTO obstacle
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = home AND c.relname = ANY ({all_names_text});
    obstacle := coalesce(obstacle, (SELECT string_agg('function ' || p.oid::regprocedure, '; ') FROM pg_proc p
                                     WHERE p.pronamespace = quote_ident(home)::regnamespace AND p.proname = ANY ({function_names_text})));
    IF obstacle IS NOT NULL THEN
        RAISE EXCEPTION 'in the schema % there is already: %; relay migrate did not create it',
            quote_ident(home), obstacle
            USING ERRCODE = 'RLY01', HINT = 'choose another name in RELAY_TABLE, or rename what is there';
    END IF;
    IF NOT has_schema_privilege(home, 'CREATE') THEN
        RAISE EXCEPTION 'the role % may not create tables in the schema %', quote_ident(current_user), quote_ident(home)
            USING ERRCODE = 'RLY06',
                  HINT = format('as its owner: GRANT USAGE, CREATE ON SCHEMA %I TO %I; or give an administrator what '
                                '`relay migrate --print` writes', home, current_user);
    END IF;
ELSE
    IF to_regclass(quote_ident({table_name_text})) IS NULL THEN
        RAISE EXCEPTION 'the table %.% is gone, what relay migrate made beside it is still there',
            quote_ident(home), quote_ident({table_name_text})
            USING ERRCODE = 'RLY01', HINT = format('restore it, or: DROP TABLE %s; DROP FUNCTION %I(), %I(int)',
                (SELECT string_agg(format('%I', name), ', ') FROM unnest({companions_text}) name
                  WHERE to_regclass(quote_ident(name)) IS NOT NULL), {ring_name_text}, {bell_wait_name_text});
    END IF;
    IF known_version > {latest} AND known_compatible_from > {latest} THEN
        RAISE EXCEPTION 'the schema has version %, compatible from %; this relay knows version {latest}',
            known_version, known_compatible_from
            USING ERRCODE = 'RLY02', HINT = 'upgrade the relay';
    END IF;
    IF {payload_text} <> known_payload_type THEN
        RAISE EXCEPTION 'the payload column is %, not %', known_payload_type, {payload_text}
            USING ERRCODE = 'RLY03', HINT = 'the type is chosen once; for another one use another table (RELAY_TABLE)';
    END IF;
END IF;
SELECT string_agg(quote_ident(wanted), ', ') INTO obstacle
  FROM unnest(ARRAY[{role_text}, {writer_text}]::text[]) wanted
 WHERE wanted IS NOT NULL AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted);
IF obstacle IS NOT NULL THEN
    RAISE EXCEPTION 'no such role: %', obstacle
        USING ERRCODE = 'RLY04', HINT = 'create it first: CREATE ROLE name LOGIN';
END IF;
