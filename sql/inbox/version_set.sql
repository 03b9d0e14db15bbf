-- The aggregate has been brought to this version.
--
-- Values:  $1 consumer, $2 aggregate type, $3 aggregate id, $4 version.
-- Locks:   the row that version_lock.sql has locked.
-- Index:   the primary key.
-- Caller:  relay/inbox/ledger.py, under the order policy `version`.
UPDATE processed_versions SET version = $4, processed_at = now()
 WHERE consumer_name = $1 AND aggregate_type = $2 AND aggregate_id = $3
