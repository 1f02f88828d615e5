-- Ends sequences that wait for a slot. Every step parked for them gets the same error. One whose START was committed is
-- lost; of any other no record stays.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term   2 tombstone ms, then per sequence: entry id of its wait, encoded reply
-- reply  per sequence: steps answered; -1 if it does not wait under that entry any more

local function reject(keys, sid, entry, reply)
  local got = redis.call('HMGET', keys.record, 'st', 'be', 'cm', 'sn')
  if (got[1] ~= 'w' and got[1] ~= 'm') or got[2] ~= entry then return -1 end
  if got[1] == 'w' or number(got[3]) < number(got[4]) then return refuse_waiting(keys, sid, reply, 'REJECTED') end
  local count, version = refuse_steps(keys, sid, reply, 'REJECTED')
  -- The refused steps are none of it: its client hears of the last one that was answered.
  redis.call('HSET', keys.record, 'nx', number(got[3]))
  -- Nor is what may still lie in its last owner's inbox: `drain` tells whoever waits for that.
  redis.call('HDEL', keys.record, 'fe')
  keys.deadlines = DEADLINES
  release(keys, sid, 'o', 0, version, ARGV[2])
  return count
end

local results = for_each(MODEL_KEYS, 2, 2, reject, -1)
tally_all()
return results
