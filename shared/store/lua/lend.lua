-- Notes to which shards slots of a model's executors are lent, before anything in these shards may take them.
--
-- KEYS   1 counters of terms   2 lent slots of the model
-- ARGV   1 model   2 term of the leader   then per note: field, value; without a value it is removed
-- reply  1
-- atomic all notes, and only those of the newest leader: an older one is refused with error FENCED.

local newest = number(redis.call('HGET', KEYS[1], ARGV[1]))
if newest > tonumber(ARGV[2]) then
  return redis.error_reply(string.format('FENCED term %s is older than %.0f', ARGV[2], newest))
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
return 1
