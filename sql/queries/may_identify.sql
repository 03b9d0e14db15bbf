-- Purpose: whether this role may ask which installation of PostgreSQL this is; an administrator can forbid it.
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/outbox.py `open`.
SELECT has_function_privilege('pg_control_system()', 'EXECUTE') AS may_identify
