-- Accepts stateless requests, in the order given. A request that is in its queue already, or being run, was sent before.
--
-- KEYS   per queue: the ten keys of shared/lua/work.lua
-- ARGV   1 bound of a queue (0: none)
--        per queue: number of requests, and per request: id, level (20 digits), bound of its level (0: none),
--                   timeout us (0: none), action (R or D), rows, 1: answers leave in order, shape, message
-- reply  per request: 1 accepted, 0 its queue is full
-- atomic all of it

local FIELDS = 9
local bound, now = tonumber(ARGV[1]), now_us()

-- How many of a level wait, delayed or not ('/' is the character after '.'), those of this call included.
local function level_sizes(keys)
  local sizes = {}
  return function(level, more)
    if not sizes[level] then
      sizes[level] = redis.call('ZLEXCOUNT', keys.queue, '[' .. level .. '.', '(' .. level .. '/')
    end
    sizes[level] = sizes[level] + more
    return sizes[level]
  end
end

local function add(list, first, second)
  list[#list + 1] = first
  list[#list + 1] = second
end

local function put(command, key, pairs)
  if #pairs > 0 then redis.call(command, key, unpack(pairs)) end
end

local function enqueue(keys, a, count, results)
  local ids = {}
  for i = 1, count do ids[i] = ARGV[a + (i - 1) * FIELDS + 1] end
  local known, size = redis.call('HMGET', keys.meta, unpack(ids)), redis.call('ZCARD', keys.queue)
  local number = redis.call('INCRBY', keys.number, count) - count
  local in_level = level_sizes(keys)
  local queue, metas, messages, deadlines, order = {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local f = a + (i - 1) * FIELDS
    local level, own, timeout, ordered = ARGV[f + 2], tonumber(ARGV[f + 3]), tonumber(ARGV[f + 4]), ARGV[f + 7] == '1'
    if known[i] or ordered and redis.call('HEXISTS', keys.early, id) == 1 then
      results[#results + 1] = 1
    elseif bound > 0 and size >= bound or own > 0 and in_level(level, 0) >= own then
      results[#results + 1] = 0
    else
      local meta = { place = level .. '.0.' .. string.format('%016d', number + i), arrived = now, deadline = '0',
        action = ARGV[f + 5], rows = ARGV[f + 6], ordered = ordered, shape = ARGV[f + 8] }
      if timeout > 0 then
        meta.deadline = string.format('%.0f', now + timeout)
        add(deadlines, meta.deadline, id)
      end
      if own > 0 then in_level(level, 1) end
      if ordered then add(order, number + i, id) end
      add(queue, 0, member_of(meta, id))
      add(metas, id, meta_text(meta))
      add(messages, id, ARGV[f + 9])
      size = size + 1
      results[#results + 1] = 1
    end
  end
  put('ZADD', keys.queue, queue)
  put('HSET', keys.meta, metas)
  put('HSET', keys.messages, messages)
  put('ZADD', keys.deadlines, deadlines)
  put('ZADD', keys.order, order)
  if #queue > 0 then wake(keys) end
end

local results, a = {}, 1
for i = 1, #KEYS / WORK_KEYS do
  local count = tonumber(ARGV[a + 1])
  enqueue(work_keys(i), a + 1, count, results)
  a = a + 1 + count * FIELDS
end
return results
