-- Ends sequences whose idle marker has run out. Only the marker decides; the deadline said when to look at it. A paused
-- sequence is resumed when its pause is over.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term   2 tombstone ms
-- reply  per sequence: 1 expired, 2 over because it was ended (`end`), 0 not over (its deadline was set to another time,
--        or removed until its next commit)

local function expire(keys, sid)
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'vr', 'be', 'en', 'sn', 'ps')
  local state = got[1]
  local kind = ended_as(got[8], number(got[9])) or 'x'
  if not is_sound(state, tonumber(got[4]), tonumber(got[5]), 0, got[6]) then error(NOT_SOUND) end
  if got[7] == NO_ENTRY then
    local until_ms = times_of(got[10])
    if until_ms > clock_ms() then redis.call('ZADD', DEADLINES, until_ms, sid) else go_on(keys, sid) end
    return 0
  end
  if (state ~= 'l' and state ~= 'p' and state ~= 'm') or got[4] ~= got[5] then
    redis.call('ZREM', DEADLINES, sid)
    return 0
  end
  local left = redis.call('PTTL', keys.idle)
  if left > 0 then
    redis.call('ZADD', DEADLINES, clock_ms() + left, sid)
    return 0
  end
  if state == 'p' then
    count_line(LINE, 'gone:' .. got[6], 1)
  elseif state == 'm' then
    -- Between two owners: no step waits with it. The leader may have it in its line, so it is told; whoever ended the
    -- sequence, its idle time is over.
    redis.call('XDEL', STARTS, got[7])
    redis.call('XADD', FEED, '*', 'q', sid, 'e', 0, 'k', 'x', 'b', got[7])
  else
    keys.owned, keys.feed = owned_by(got[2] or '', MODEL), FEED
    -- The record's owner is none. Or its set was removed, and has not been made again yet (sweep.lua).
    if redis.call('SISMEMBER', keys.owned, sid) == 0 then error(NOT_SOUND) end
    redis.call('XADD', BASE .. 'inbox:' .. got[2], '*', 'k', 'expired', 'q', sid, 'e', got[3],
      'd', kind == 'x' and 0 or 1)
  end
  keys.deadlines = DEADLINES
  release(keys, sid, kind, got[3], got[6], ARGV[2])
  return kind == 'x' and 1 or 2
end

return for_each(MODEL_KEYS, 2, 0, expire, 0)
