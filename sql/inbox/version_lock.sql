-- The version of an aggregate that was applied last, locked until the end of the transaction; -1 where there is none.
--
-- Values:  $1 consumer, $2 aggregate type, $3 aggregate id.
-- Locks:   the aggregate's row: two versions at the same time follow each other.
-- Index:   the primary key.
-- Caller:  relay/inbox/ledger.py, under the order policy `version`.
INSERT INTO processed_versions AS known (consumer_name, aggregate_type, aggregate_id, version) VALUES ($1, $2, $3, -1)
ON CONFLICT (consumer_name, aggregate_type, aggregate_id) DO UPDATE SET version = known.version
RETURNING version
