-- Puts everything that an executor holds back at its old place: it is dead, or it leaves. What its tags got is forgotten.
-- A request that had left the queue in time is not late any more: it has no deadline from here on.
--
-- KEYS   the queue (shared/lua/work.lua)
-- ARGV   1 executor
-- reply  number of requests

local keys = work_keys(1)
redis.call('HDEL', keys.takers, ARGV[1])
local held = redis.call('HGETALL', keys.held)
local count = 0
for i = 1, #held, 2 do
  if held[i + 1] == ARGV[1] then
    local id = held[i]
    redis.call('ZADD', keys.queue, 0, member_of(meta_of(redis.call('HGET', keys.meta, id)), id))
    redis.call('HDEL', keys.held, id)
    count = count + 1
  end
end
if count > 0 then wake(keys) end
return count
