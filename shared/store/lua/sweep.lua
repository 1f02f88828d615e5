-- Repairs sequences after a key was removed that could not be read and held something of many sequences. What the
-- records say is written again: which executor owns them, that they wait, when to look at their idle markers. A
-- sequence whose next step lies in no stream any more is lost.
--
-- KEYS   1 fence of the model   2 starts stream   3 deadlines
--        per sequence: record
-- ARGV   1 term   2 model   3 prefix of every key of this shard
--        per sequence: sequence id
-- reply  per sequence: 1 repaired or sound, 0 lost, or over before
-- The owner's inbox and owned set, parked steps and idle marker follow from the record; they carry the same hash tag.
-- Safe to repeat.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local BASE, UNREADABLE = ARGV[3], 'a step of a sequence is nowhere'

-- The steps that lie in a stream, as a set of `<number> <sequence>`; each stream is read once per call.
local streams = {}
local function steps_in(stream)
  if streams[stream] then return streams[stream] end
  local found = {}
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local fields = fields_of(entry)
    if fields.q and fields.n then found[fields.n .. ' ' .. fields.q] = true end
  end
  streams[stream] = found
  return found
end

local function look_over(record, sid)
  local got = redis.call('HMGET', record, 'st', 'ow', 'nx', 'cm', 'vr', 'be')
  local state = got[1]
  if state ~= 'l' and state ~= 'w' and state ~= 'm' and state ~= 'p' then return 0 end
  local accepted, committed = tonumber(got[3]), tonumber(got[4])
  if not is_sound(state, accepted, committed, 0, got[5]) then error(NOT_SOUND) end
  local step = string.format('%.0f', committed + 1) .. ' ' .. sid
  if state == 'l' then
    redis.call('SADD', BASE .. 'owned:' .. got[2] .. ':' .. ARGV[2], sid)
    if accepted > committed and not steps_in(BASE .. 'inbox:' .. got[2])[step] then error(UNREADABLE) end
  elseif state ~= 'p' then
    if accepted > committed and not steps_in(BASE .. 'parked:' .. sid)[step] then error(UNREADABLE) end
    if #redis.call('XRANGE', KEYS[2], got[6], got[6]) == 0 then
      redis.call('HSET', record, 'be',
        redis.call('XADD', KEYS[2], '*', 'q', sid, 'v', got[5], 'u', '0', 'k', state))
    end
  end
  if accepted == committed then
    local left = math.max(0, redis.call('PTTL', BASE .. 'idle:' .. sid))
    redis.call('ZADD', KEYS[3], 'NX', clock_ms() + left, sid)
  end
  return 1
end

local results = {}
for i = 1, #KEYS - 3 do
  local done, looked_at = for_one(KEYS[3 + i], look_over, KEYS[3 + i], ARGV[3 + i])
  results[i] = done and looked_at or 0
end
return results
