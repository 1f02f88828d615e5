-- Accepts stateless requests, in the order given. A request that is in its queue already, or being run, was sent before.
--
-- KEYS   per queue: the ten keys of shared/lua/work.lua
-- ARGV   1 number of queues   2 bound of a queue (0: none)
--        per request: index of its queue, id, level (20 digits), bound of its level (0: none), timeout us (0: none),
--                     action (R or D), rows, 1: answers leave in order, shape, message
-- reply  per request: 1 accepted, 0 its queue is full

local queues = {}
for i = 1, tonumber(ARGV[1]) do queues[i] = work_keys(i) end
local bound, now = tonumber(ARGV[2]), now_us()

local function is_full(keys, level, own)
  if bound > 0 and redis.call('ZCARD', keys.queue) >= bound then return true end
  -- Everything of the level, delayed or not: '/' is the character after '.'.
  return own > 0 and redis.call('ZLEXCOUNT', keys.queue, '[' .. level .. '.', '(' .. level .. '/') >= own
end

local function enqueue(keys, item)
  if redis.call('HEXISTS', keys.meta, item.id) == 1 or redis.call('HEXISTS', keys.early, item.id) == 1 then return 1 end
  if is_full(keys, item.level, item.own) then return 0 end
  local number = redis.call('INCR', keys.number)
  local meta = { place = item.level .. '.0.' .. string.format('%016d', number), arrived = now, deadline = '0',
    action = item.action, rows = item.rows, ordered = item.ordered, shape = item.shape }
  if item.timeout > 0 then
    meta.deadline = string.format('%.0f', now + item.timeout)
    redis.call('ZADD', keys.deadlines, meta.deadline, item.id)
  end
  redis.call('ZADD', keys.queue, 0, member_of(meta, item.id))
  redis.call('HSET', keys.meta, item.id, meta_text(meta))
  redis.call('HSET', keys.messages, item.id, item.message)
  if item.ordered then redis.call('ZADD', keys.order, number, item.id) end
  wake(keys)
  return 1
end

local results = {}
for i = 1, (#ARGV - 2) / 10 do
  local a = 2 + (i - 1) * 10
  results[i] = enqueue(queues[tonumber(ARGV[a + 1])], { id = ARGV[a + 2], level = ARGV[a + 3],
    own = tonumber(ARGV[a + 4]), timeout = tonumber(ARGV[a + 5]), action = ARGV[a + 6], rows = ARGV[a + 7],
    ordered = ARGV[a + 8] == '1', shape = ARGV[a + 9], message = ARGV[a + 10] })
end
return results
