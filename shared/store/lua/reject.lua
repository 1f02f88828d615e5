-- Ends sequences that wait for a slot, whether new or between two owners. Every step parked for them gets the same
-- error, and no record stays.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term, then per sequence: entry id of its wait, encoded reply
-- reply  per sequence: steps answered; -1 if it does not wait under that entry any more

local function reject(keys, sid, entry, reply)
  local got = redis.call('HMGET', keys.record, 'st', 'be')
  if (got[1] ~= 'w' and got[1] ~= 'm') or got[2] ~= entry then return -1 end
  return refuse_waiting(keys, sid, reply, 'REJECTED')
end

local results = for_each(MODEL_KEYS, 1, 2, reject, -1)
tally_all()
return results
