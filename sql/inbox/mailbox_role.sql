-- What the sidecar and the service need on the inbox table. The functions are everybody's, their rights are the caller's.
--
-- Locks:   none beyond the catalog's rows.
-- Caller:  0002_mailbox.sql; {role} is the quoted name.
GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role};
GRANT SELECT, INSERT, UPDATE ON {writer} TO {role};
