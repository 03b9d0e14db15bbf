-- One message, recorded as processed before its effect, in the effect's own transaction.
--
-- Values:  $1 consumer, $2 message id; sent as literals, in one message with BEGIN.
-- Says:    INSERT 0 1 where it is new, INSERT 0 0 where it was processed before.
-- Locks:   its own row; a second copy at the same time waits here for the first one's end.
-- Index:   the primary key.
-- Caller:  relay/inbox/ledger.py, before each handler.
INSERT INTO processed_messages (consumer_name, message_id) VALUES ($1, $2)
ON CONFLICT (consumer_name, message_id) DO NOTHING
