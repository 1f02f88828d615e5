-- Passes a wake-up on: it reached an executor that had become busy.
--
-- KEYS   the queue (shared/store/lua/work.lua)
-- reply  0

wake_next(work_keys(1))
return 0
