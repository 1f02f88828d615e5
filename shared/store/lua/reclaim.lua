-- Takes sequences away from an executor that is dead or leaving: from here on its commits are refused.
-- Each sequence goes to the starts stream with kind m, which is served before new sequences, and `assign` gives it a
-- new owner. A sequence that may be paged and has no open step is paged: it needs no owner before its next step.
--
-- KEYS   those of leader.lua   7 owned sequences of (executor, model)   8 the executor's inbox
-- ARGV   1 term   2 executor   3 how many at most   4 tombstone ms
--        5 owners that may be lost with the same next step before that step is given up (0: this executor leaves, it is
--          not lost)
--        6 the sequences with a step in the inbox behind this entry are taken first: somebody may wait for its answer;
--          '' the inbox is not looked at
--        then, to take only some: their versions, or their ids; 6 is then where the call before stopped, '' in the first call
-- reply  {number of sequences taken, entries of the inbox looked at}; {0, 0} if the executor owns no sequence any more:
--        what stands behind that entry is of other models, or left to `drain`
--        with those: {number of sequences taken, where to go on}; 0 when all owned sequences have been looked at

local OWNED, INBOX = KEYS[MODEL_KEYS + 1], KEYS[MODEL_KEYS + 2]

local only = nil
for i = 7, #ARGV do
  only = only or {}
  only[ARGV[i]] = true
end

-- Counts the lost owner for the next step, which may be what the owner died of. Once a step is suspected, only owners
-- that ran it apart from others (`attempt`) count.
local function count_lost(record, step, epoch)
  local got = redis.call('HMGET', record, 'tk', 'tr')
  if suspicion(got[1], step) and got[2] ~= epoch then return end
  local n, count = string.match(got[1] or '', '(%d+) (%d+)')
  count = tonumber(n) == step and tonumber(count) + 1 or 1
  redis.call('HSET', record, 'tk', step .. ' ' .. count)
  if count >= tonumber(ARGV[5]) then redis.call('HSET', record, 'gu', step) end
end

local function reclaim(sid)
  local keys = sequence_keys(BASE .. 'seq:' .. sid)
  keys.owned, keys.deadlines, keys.feed = OWNED, DEADLINES, FEED
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'sn', 'du', 'vr', 'pg')
  if got[1] and not STATES[got[1]] then error(NOT_SOUND) end
  if got[1] ~= 'l' then return end
  -- Another executor owns it, and that executor's set agrees: a left-over of this executor's set.
  if got[2] ~= ARGV[2] and redis.call('SISMEMBER', owned_by(got[2] or '', MODEL), sid) == 1 then return end
  if got[2] ~= ARGV[2] or not is_sound(got[1], tonumber(got[4]), tonumber(got[5]), tonumber(got[6]), got[8]) then
    error(NOT_SOUND)
  end
  local accepted, committed, start = number(got[4]), number(got[5]), number(got[6])
  -- A state that only the dead executor held is lost, unless the next step is a START, which needs none.
  local lost = got[7] ~= '1' and start ~= committed + 1
  if lost and accepted == committed then
    release(keys, sid, 'o', got[3], got[8], ARGV[4])
    return
  end
  if not only then count_line(LINE, (ARGV[5] == '0' and 'leaving:' or 'lost:') .. got[8], 1) end
  if accepted == committed and got[9] then
    page(keys.record, LINE, got[8])
    return
  end
  if lost then lose_state(keys.record, committed, 'o', start) end
  if ARGV[5] ~= '0' and accepted > committed then count_lost(keys.record, committed + 1, got[3]) end
  move_on(keys.record, sid, got[8])
  count_line(LINE, 's:' .. got[8], accepted - committed)
end

-- No new sequence comes to the executor from here on.
if not only then redis.call('DEL', spares_of(ARGV[2], MODEL)) end

-- The inbox is that of all models, and each one's leader comes here.
if redis.call('EXISTS', OWNED) == 0 then return { 0, 0 } end

local most, taken = tonumber(ARGV[3]), 0

local function take(sid)
  taken = taken + 1
  for_one(BASE .. 'seq:' .. sid, reclaim, sid)
end

local function take_owned(sid)
  if redis.call('SREM', OWNED, sid) == 1 then take(sid) end
end

-- A part of the set in each call: of 100,000 sequences most may be others.
if only then
  local found = redis.call('SSCAN', OWNED, number(ARGV[6]), 'COUNT', most)
  for _, sid in ipairs(found[2]) do
    if only[sid] or only[redis.call('HGET', BASE .. 'seq:' .. sid, 'vr') or ''] then take_owned(sid) end
  end
  return { taken, tonumber(found[1]) }
end

local function take_its_sequence(entry)
  local fields = fields_of(entry)
  local sid = fields.q or select(5, step_of(fields.a))
  if sid then take_owned(sid) end
end
local looked_at = ARGV[6] == '' and 0 or select(2, each_entry(INBOX, ARGV[6], most, take_its_sequence))
-- The others follow when every step in the inbox has been looked at.
if looked_at < most then
  for _, sid in ipairs(redis.call('SPOP', OWNED, most - taken)) do take(sid) end
end
return { taken, looked_at }
