-- The doorbell's trigger, present or absent as wanted; where nothing is asked for, as it was chosen last.
--
-- Purpose: while a relay sleeps it holds the bell's lock exclusively; every insert then finds it taken and
--          rings at its commit. While none sleeps this is one shared lock and no function call.
-- Locks:   only when something changes: SHARE ROW EXCLUSIVE on the table to add, ACCESS EXCLUSIVE to drop.
-- Caller:  the last step, through block.sql; bell_class and lock_object are the stored numbers. {wanted} is true,
--          false or NULL.
has_trigger := EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass(quote_ident({table_name_text})) AND tgname = {ring_name_text});
IF coalesce({wanted}, wants_doorbell) AND NOT has_trigger THEN
    EXECUTE format($sql$
        CREATE TRIGGER %I AFTER INSERT ON %I FOR EACH STATEMENT
        WHEN (NOT pg_catalog.pg_try_advisory_xact_lock_shared(%s, %s)) EXECUTE FUNCTION %I()
    $sql$, {ring_name_text}, {table_name_text}, bell_class, lock_object, {ring_name_text});
ELSIF NOT coalesce({wanted}, wants_doorbell) AND has_trigger THEN
    DROP TRIGGER {ring} ON {table};
END IF;
IF {wanted} <> wants_doorbell THEN
    UPDATE {meta} SET has_doorbell = {wanted};
END IF;
