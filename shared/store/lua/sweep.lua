-- Repairs sequences after a key was removed that could not be read and held something of many sequences. What the
-- records say is written again: which executor owns them and which tenant they are of, that they wait and for how long,
-- when to look at their idle markers. A sequence whose next step lies in no stream any more is lost.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term
-- reply  per sequence: 1 repaired or sound, 0 lost, or over before
-- Safe to repeat.

local UNREADABLE = 'a step of a sequence is nowhere'

local function lies_in(stream, sid, n)
  for _, step in ipairs(steps_in(stream, sid)) do
    if step.n == n then return true end
  end
  return false
end

-- Whether a sequence has its place in the line. A line that was removed begins anew, with the numbers of the same ms.
local function has_place(entry, sid)
  local found = redis.call('XRANGE', STARTS, entry, entry)[1]
  return found and fields_of(found).q == sid
end

-- How long a sequence may still wait for its first slot, us; 0: for ever. deadline: the record's field dl
local function patience_us(deadline)
  return deadline and string.format('%.0f', math.max(1, number(deadline) - clock_ms()) * 1000) or '0'
end

local function look_over(keys, sid)
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'nx', 'cm', 'vr', 'be', 'ps', 'dl')
  local state = got[1]
  if state ~= 'l' and state ~= 'w' and state ~= 'm' and state ~= 'p' then return 0 end
  local accepted, committed = tonumber(got[3]), tonumber(got[4])
  if not is_sound(state, accepted, committed, 0, got[5]) then error(NOT_SOUND) end
  local is_paused, tenant = got[6] == NO_ENTRY, tenant_of(keys.record)
  if tenant ~= '' then redis.call('SADD', sequences_of(tenant), sid) end
  if is_paused then redis.call('ZADD', DEADLINES, 'NX', times_of(got[7]), sid) end
  if state == 'l' then
    redis.call('SADD', owned_by(got[2], MODEL), sid)
    if accepted > committed and not lies_in(BASE .. 'inbox:' .. got[2], sid, committed + 1) then error(UNREADABLE) end
  elseif state ~= 'p' then
    if accepted > committed and not lies_in(keys.parked, sid, committed + 1) then error(UNREADABLE) end
    if not is_paused and not has_place(got[6], sid) then
      redis.call('HSET', keys.record, 'be', line_up(sid, state, got[5], patience_us(got[8]), tenant))
    end
  end
  if accepted == committed then
    local left = math.max(0, redis.call('PTTL', keys.idle))
    redis.call('ZADD', DEADLINES, 'NX', clock_ms() + left, sid)
  end
  return 1
end

return for_each(MODEL_KEYS, 1, 0, look_over, 0)
