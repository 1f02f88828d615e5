-- Limits the idle time of orphans: sequences whose connection was closed before their END. Unless a client uses the
-- sequence again (`submit`), it ends after a short grace. A sequence that another connection has used since is no
-- orphan.
--
-- KEYS   per sequence: its record
-- ARGV   1 gateway, then per sequence: token of the latest step that came over the connection, grace ms
-- reply  per sequence: 1 it may be idle for the grace at most, from now on or after its open steps
--        0 nothing changed: it was used by another connection, is closed, over, paused or orphaned already, or has
--        less idle time left than the grace
-- Safe to repeat.

local function orphan(keys, sid, token, grace)
  local grace_ms = tonumber(grace)
  local got = redis.call('HMGET', keys.record, 'la', 'cl', 'nx', 'cm', 'og', 'be')
  -- While it is paused, its idle time stands still.
  if got[2] ~= '0' or got[5] or got[6] == NO_ENTRY or string.match(got[1] or '', '%S+ %S+$') ~= ARGV[1] .. ' ' .. token then return 0 end
  if got[3] ~= got[4] then
    redis.call('HSET', keys.record, 'og', grace_ms)
    return 1
  end
  -- The old end of the idle time is remembered, so that `submit` can give it back.
  local left = redis.call('PTTL', keys.idle)
  if left <= grace_ms then return 0 end
  redis.call('HSET', keys.record, 'og', clock_ms() + left)
  redis.call('PEXPIRE', keys.idle, grace_ms)
  look_by(sid, clock_ms() + grace_ms)
  return 1
end

return for_each(0, 1, 2, orphan, 0)
