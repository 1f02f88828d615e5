-- Pages idle sequences because their owner wants their slots for others.
--
-- KEYS   1 owned sequences   2 feed of the model   3 counts of the waiting line
--        per sequence: its record
-- ARGV   1 executor, then per sequence: epoch
-- reply  per sequence: 1 it is paged, 0 it stays: it has an open step, another owner or epoch, steps since its
--        checkpoint, or it is to keep its slot
-- Safe to repeat: a sequence that is paged stays its last owner's until another gets it.

local OWNED, FEED, LINE, EXECUTOR = KEYS[1], KEYS[2], KEYS[3], ARGV[1]

local function page_idle(keys, sid, epoch)
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'ck', 'pg', 'vr')
  if got[2] ~= EXECUTOR or got[3] ~= epoch then return 0 end
  if got[1] == 'p' then return 1 end
  if got[1] ~= 'l' or got[4] ~= got[5] or got[5] ~= got[6] or not got[7] then return 0 end
  local spare = spare_again(keys.record, model_of(sid), got[8])
  page(keys.record, LINE, got[8])
  redis.call('SREM', OWNED, sid)
  redis.call('XADD', FEED, '*', 'q', sid, 'e', epoch, 'k', 'p', 's', spare)
  return 1
end

return for_each(3, 1, 1, page_idle, 0)
