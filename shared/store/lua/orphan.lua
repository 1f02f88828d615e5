-- Connections are gone that had used sequences and not ended them: these may be idle for a short time only, unless
-- somebody uses them again (`submit`). One that somebody else has used since is nobody's orphan.
--
-- KEYS   per sequence: record, idle marker, deadlines of the model
-- ARGV   1 gateway   per sequence: sequence id, token of the latest step that came over the connection, grace ms
-- reply  per sequence: 1 it is idle for the grace at most, from now on or after its steps in flight
--        0 it stays as it was: used by another, closed, over, orphaned before, or idle no longer than that anyway
-- Safe to repeat.

local function orphan(keys, sid, user, grace_ms)
  local got = redis.call('HMGET', keys.record, 'la', 'cl', 'nx', 'cm', 'og')
  if got[2] ~= '0' or got[5] or string.match(got[1] or '', '%S+ %S+$') ~= user then return 0 end
  if got[3] ~= got[4] then
    redis.call('HSET', keys.record, 'og', grace_ms)
    return 1
  end
  local left = redis.call('PTTL', keys.idle)
  if left <= grace_ms then return 0 end
  redis.call('HSET', keys.record, 'og', clock_ms() + left)
  redis.call('PEXPIRE', keys.idle, grace_ms)
  redis.call('ZADD', keys.deadlines, 'LT', clock_ms() + grace_ms, sid)
  return 1
end

local results = {}
for i = 1, #KEYS / 3 do
  local k, a = (i - 1) * 3, 1 + (i - 1) * 3
  local done, limited = for_one(KEYS[k + 1], orphan, { record = KEYS[k + 1], idle = KEYS[k + 2], deadlines = KEYS[k + 3] },
    ARGV[a + 1], ARGV[1] .. ' ' .. ARGV[a + 2], tonumber(ARGV[a + 3]))
  results[i] = done and limited or 0
end
return results
