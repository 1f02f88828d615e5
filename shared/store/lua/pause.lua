-- Pauses sequences: they leave their slots and run nothing until they are resumed (resume.lua), or until the pause is
-- over (expire.lua). Steps are accepted as before, and parked. A step that runs meanwhile is run again afterwards: its
-- owner's commit is refused, and its answer is the one of the second run. The idle time stands still.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term, then per sequence: end of the pause (Redis clock, ms)
-- reply  per sequence the executor whose inbox may hold steps of it, which is to be drained; '' for none;
--        false if it is not paused: it is over, is about to end, waits for its first slot, or only its owner holds its
--        state
-- Safe to repeat: a paused sequence only gets the new end of its pause.

-- Takes a sequence out of its slot, or out of the line of those that wait for one.
local function withdraw(record, sid, state, got)
  local owner, epoch, waits = got[2], got[3], got[9]
  if state == 'l' then
    redis.call('SREM', owned_by(owner, MODEL), sid)
    redis.call('XADD', BASE .. 'inbox:' .. owner, '*', 'k', 'vacated', 'q', sid, 'e', epoch)
    redis.call('XADD', FEED, '*', 'q', sid, 'e', epoch, 'k', 'p')
    count_line(LINE, 's:' .. got[8], tonumber(got[4]) - tonumber(got[5]))
  elseif state == 'm' then
    redis.call('XDEL', STARTS, waits)
    redis.call('XADD', FEED, '*', 'q', sid, 'e', 0, 'k', 'h', 'b', waits)
  else
    count_line(LINE, 'in:' .. got[8], 1)
  end
  redis.call('HSET', record, 'st', 'm', 'be', NO_ENTRY, 'ep', redis.call('INCR', EPOCHS))
  redis.call('HDEL', record, 'ow', 'in', 'sl', 'og')
end

local function pause(keys, sid, until_ms)
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'ck', 'du', 'vr', 'be', 'en', 'sn', 'ps')
  local state, accepted, committed, start = got[1], tonumber(got[4]), tonumber(got[5]), tonumber(got[11])
  if not state or TOMBSTONES[state] or state == 'w' then return false end
  if not is_sound(state, accepted, committed, start, got[8]) then error(NOT_SOUND) end
  local _, left = times_of(got[12])
  local idle_left = accepted == committed and redis.call('PTTL', keys.idle) or 0
  -- Its idle time is over, also that behind a pause, and only the leader has not ended it yet.
  if idle_left < 0 then return false end
  if got[9] ~= NO_ENTRY then
    if state == 'l' and got[7] ~= '1' or ended_as(got[10], start) then return false end
    left = idle_left
    withdraw(keys.record, sid, state, got)
  end
  redis.call('HSET', keys.record, 'ps', until_ms .. ' ' .. (left or 0))
  -- A leader that hears of the wish late may be behind the end of the pause already.
  local idle_ms = math.max(0, until_ms - clock_ms()) + (left or 0)
  if accepted == committed then redis.call('PEXPIRE', keys.idle, math.max(1, idle_ms)) end
  redis.call('ZADD', DEADLINES, until_ms, sid)
  return state == 'l' and accepted > number(got[6]) and got[2] or ''
end

return for_each(MODEL_KEYS, 1, 1, pause, false)
