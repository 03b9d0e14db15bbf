-- Renews the right to write, and fences: whoever has lost it changes no row here, and writes none.
--
-- Values:  $1 queue, $2 owner, $3 for how long; '0' gives it back.
-- Says:    UPDATE 1 where it is still this owner's.
-- Locks:   the queue's row to the end of the transaction: nobody takes over in the middle of a batch.
-- Index:   the primary key.
-- Caller:  relay/inbox/mailbox.py, first in each batch's transaction, every few seconds, and at the end.
UPDATE {writer} SET leased_until = clock_timestamp() + $3::interval WHERE queue = $1 AND owner = $2
