-- Reads the messages of requests, for a batch strategy that looks into them; '' for a request that is gone.
--
-- KEYS   the queue (shared/store/lua/work.lua)
-- ARGV   ids
-- reply  { id, message, id, message, ... }

return messages_of(work_keys(1), ARGV)
