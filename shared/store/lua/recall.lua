-- Takes an executor's spare slots back. The feed says so too: what stands before that entry says which were taken.
--
-- KEYS   those of leader.lua   7 spare slots of (executor, model)
-- ARGV   1 term   2 executor
-- reply  number of the recall, which is that of no other one
-- Safe to repeat.

redis.call('DEL', KEYS[MODEL_KEYS + 1])
local recall = redis.call('INCR', EPOCHS)
-- A leader of a release that knew no spare slots takes it for the end of epoch 0, which no sequence has.
redis.call('XADD', FEED, '*', 'q', '', 'e', 0, 'k', 'r', 'n', recall, 'x', ARGV[2])
return recall
