-- Passes a wake-up on to another executor: the one that it reached had become busy.
--
-- KEYS   the queue (shared/store/lua/work.lua)
-- reply  0

wake_next(work_keys(1))
return 0
