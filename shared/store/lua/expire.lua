-- Ends sequences whose idle marker has run out. Only the marker decides; the deadline said when to look at it.
--
-- KEYS   1 fence of the model   2 deadlines   3 feed   4 counts of the waiting line   5 starts stream
--        per sequence: record, idle marker, parked steps, checkpoint
-- ARGV   1 term   2 tombstone ms   3 prefix of this shard's inboxes
--        4 prefix of the owned sets (executor, model follow)   5 model
--        per sequence: sequence id
-- reply  per sequence: 1 expired, 0 not (its deadline was set to another time, or removed until its next commit)
-- The owner's inbox and owned set follow from the record; they carry the hash tag of the declared keys.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local function expire(keys, sid)
  local got = redis.call('HMGET', keys.record, 'st', 'ow', 'ep', 'nx', 'cm', 'vr', 'be')
  local state = got[1]
  if not is_sound(state, tonumber(got[4]), tonumber(got[5]), 0, got[6])
    or state == 'l' and redis.call('SISMEMBER', ARGV[4] .. (got[2] or '') .. ':' .. ARGV[5], sid) == 0 then
    error(NOT_SOUND)
  end
  if (state ~= 'l' and state ~= 'p' and state ~= 'm') or got[4] ~= got[5] then
    redis.call('ZREM', keys.deadlines, sid)
    return 0
  end
  local left = redis.call('PTTL', keys.idle)
  if left > 0 then
    redis.call('ZADD', keys.deadlines, clock_ms() + left, sid)
    return 0
  end
  if state == 'p' then
    count_line(KEYS[4], 'gone:' .. got[6], 1)
  elseif state == 'm' then
    -- Between two owners: no step waits with it. The leader may have it in its line, so it is told.
    redis.call('XDEL', KEYS[5], got[7])
    redis.call('XADD', KEYS[3], '*', 'q', sid, 'e', 0, 'k', 'x', 'b', got[7])
  else
    keys.owned, keys.feed = ARGV[4] .. got[2] .. ':' .. ARGV[5], KEYS[3]
    redis.call('XADD', ARGV[3] .. got[2], '*', 'k', 'expired', 'q', sid, 'e', got[3])
  end
  release(keys, sid, 'x', got[3], ARGV[2])
  return 1
end

local results = {}
for i = 1, (#KEYS - 5) / 4 do
  local k = 5 + (i - 1) * 4
  local done, ended = for_one(KEYS[k + 1], expire, { deadlines = KEYS[2], record = KEYS[k + 1], idle = KEYS[k + 2],
    parked = KEYS[k + 3], checkpoint = KEYS[k + 4] }, ARGV[5 + i])
  -- Its record could not be read, and it is lost now: the deadline under this id goes too.
  if not done then redis.call('ZREM', KEYS[2], ARGV[5 + i]) end
  results[i] = done and ended or 0
end
return results
