-- Answers requests that this executor holds. A request that another executor was given meanwhile is left to that
-- executor. Where answers leave in the order of arrival, an early one is held back until the answers before it are
-- there.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
--        12.. the cache (shared/store/lua/cache.lua)
-- ARGV   1 executor   2 packed counts of the execution
--        per request: id, reply, packed counts, name in the cache ('': it is not stored), bytes that the cache may hold
-- reply  { requests left in the queue, per request: 1 answered, 0 another executor holds it, or it was answered
--        before }
-- atomic answers and counts: each request counts once, and the execution if it answered any. An answer is stored in the
-- cache in the call that sends it.

local FIELDS = 5

local keys, counts = work_keys(1), KEYS[WORK_KEYS + 1]
local ids, fields = {}, {}
for a = 3, #ARGV, FIELDS do ids[#ids + 1] = ARGV[a] end
local holders = redis.call('HMGET', keys.held, unpack(ids))
local ordered = redis.call('EXISTS', keys.order, keys.early) > 0
local results, done, stored = { redis.call('ZCARD', keys.queue) }, {}, {}
for i, id in ipairs(ids) do
  local held = holders[i] == ARGV[1]
  results[i + 1] = held and 1 or 0
  if held then
    done[#done + 1] = id
    fields[#done] = 2 + (i - 1) * FIELDS
  end
end
if #done > 0 then
  -- First, because it frees memory: a Redis without memory lets a script go on once that has begun to write.
  redis.call('HDEL', keys.held, unpack(done))
  redis.call('HDEL', keys.meta, unpack(done))
  redis.call('HDEL', keys.messages, unpack(done))
  tally(counts, ARGV[2])
end
for i, id in ipairs(done) do
  local f = fields[i]
  local reply = ARGV[f + 2]
  if ARGV[f + 4] ~= '' then stored[#stored + 1] = f end
  if ordered and redis.call('ZSCORE', keys.order, id) then
    redis.call('HSET', keys.early, id, reply)
  else
    send(id, reply)
  end
  tally(counts, ARGV[f + 3])
end
if ordered then send_ordered(keys) end
send_answers()
tally_all()
for _, f in ipairs(stored) do
  cache_put(cache_keys(), ARGV[f + 4], ARGV[f + 2], tonumber(ARGV[f + 5]), now_us())
end
return results
