-- Takes sequences away from an executor that is dead or leaving: from here on its commits are refused.
-- Each sequence goes to the starts stream with kind m, which is served before new sequences, and `assign` gives it a
-- new owner. A sequence that may be paged and has no open step is paged: it needs no owner before its next step.
--
-- KEYS   1 fence of the model   2 epoch counter of the shard   3 starts stream   4 owned sequences of (executor, model)
--        5 deadlines   6 feed   7 counts of the waiting line
-- ARGV   1 term   2 executor   3 how many at most   4 tombstone ms   5 prefix of every key of this shard
--        6 owners that may be lost with the same next step before that step is given up (0: this executor leaves, it is
--          not lost)
--        7 model   then, to take only some: their versions
-- reply  number of sequences taken or looked at; 0 if the executor owns none (of these versions) any more
-- A record's key follows from the sequence id in the owned set; it carries the hash tag of the declared keys.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local versions = nil
for i = 8, #ARGV do
  versions = versions or {}
  versions[ARGV[i]] = true
end

-- Counts the lost owner for the next step, which may be what the owner died of. Once a step is suspected, only owners
-- that ran it apart from others (`attempt`) count.
local function count_lost(record, step, epoch)
  local got = redis.call('HMGET', record, 'tk', 'tr')
  if suspicion(got[1], step) and got[2] ~= epoch then return end
  local n, count = string.match(got[1] or '', '(%d+) (%d+)')
  count = tonumber(n) == step and tonumber(count) + 1 or 1
  redis.call('HSET', record, 'tk', step .. ' ' .. count)
  if count >= tonumber(ARGV[6]) then redis.call('HSET', record, 'gu', step) end
end

local function reclaim(sid)
  local p = ARGV[5]
  local keys = { record = p .. 'seq:' .. sid, idle = p .. 'idle:' .. sid, parked = p .. 'parked:' .. sid,
    checkpoint = p .. 'checkpoint:' .. sid, owned = KEYS[4], deadlines = KEYS[5], feed = KEYS[6] }
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'sn', 'du', 'vr', 'pg')
  if got[1] ~= 'l' then return end
  -- Another executor owns it, and that executor's set agrees: a left-over of this executor's set.
  if got[2] ~= ARGV[2] and redis.call('SISMEMBER', p .. 'owned:' .. (got[2] or '') .. ':' .. ARGV[7], sid) == 1 then
    return
  end
  if got[2] ~= ARGV[2] or not is_sound(got[1], tonumber(got[4]), tonumber(got[5]), tonumber(got[6]), got[8]) then
    error(NOT_SOUND)
  end
  local accepted, committed, start = number(got[4]), number(got[5]), number(got[6])
  -- A state that only the dead executor held is lost, unless the next step is a START, which needs none.
  local lost = got[7] ~= '1' and start ~= committed + 1
  if lost and accepted == committed then
    release(keys, sid, 'o', got[3], ARGV[4])
    return
  end
  if not versions then count_line(KEYS[7], (ARGV[6] == '0' and 'leaving:' or 'lost:') .. got[8], 1) end
  if accepted == committed and got[9] then
    page(keys.record, KEYS[7], got[8])
    return
  end
  if lost then lose_state(keys.record, committed, 'o', start) end
  if ARGV[6] ~= '0' and accepted > committed then count_lost(keys.record, committed + 1, got[3]) end
  move_on(keys.record, KEYS[3], KEYS[2], sid, got[8])
  count_line(KEYS[7], 's:' .. got[8], accepted - committed)
end

if versions then
  local taken = 0
  for _, sid in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    if taken == tonumber(ARGV[3]) then break end
    if versions[redis.call('HGET', ARGV[5] .. 'seq:' .. sid, 'vr') or ''] then
      redis.call('SREM', KEYS[4], sid)
      for_one(ARGV[5] .. 'seq:' .. sid, reclaim, sid)
      taken = taken + 1
    end
  end
  return taken
end

local members = redis.call('SPOP', KEYS[4], ARGV[3])
for _, sid in ipairs(members) do for_one(ARGV[5] .. 'seq:' .. sid, reclaim, sid) end
return #members
