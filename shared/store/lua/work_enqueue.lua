-- Accepts stateless requests, in the order given. A request that is in its queue or is being run was sent before, and
-- is not accepted twice. A request whose answer is in the response cache is answered at once and enters no queue; where
-- answers leave in the order of arrival, its answer waits for the answers before it.
--
-- KEYS   per queue: the ten keys of shared/store/lua/work.lua
--        then per queue: tally of the model version
--        then the cache
-- ARGV   1 bound of a queue, with the answers that it holds back (0: none)
--        2 base of the summaries' buckets (0: no summaries)   3 the last bucket
--        per queue: number of requests, and per request: id, level (20 digits), bound of its level (0: none),
--                   timeout us (0: none), action (R or D), rows, 1: answers leave in order, shape, message,
--                   name in the cache ('': it is not looked up), when it arrived at the gateway, us
-- reply  per request: 1 accepted, 0 its queue is full, or its answer from the cache
-- atomic all of it

local FIELDS = 11
local bound, now, cache = tonumber(ARGV[1]), now_us(), cache_keys()

-- The answer to the request at ARGV[f], if it may be looked up and is known.
local function looked_up(f)
  return ARGV[f + 10] ~= '' and cache_get(cache, ARGV[f + 10], now) or nil
end

local function count_lookup(f, counts, reply)
  if ARGV[f + 10] == '' then return end
  tally_lookup(counts, reply ~= nil, now - tonumber(ARGV[f + 11]), tonumber(ARGV[2]), tonumber(ARGV[3]))
end

-- How many requests of a level wait, delayed or not, with the ones of this call. ('/' is the character after '.', so
-- the range holds every member that begins with the level and a dot.)
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

local function put(command, key, pairs)
  if #pairs > 0 then redis.call(command, key, unpack(pairs)) end
end

local function enqueue(keys, counts, a, count, results)
  local ids = {}
  for i = 1, count do ids[i] = ARGV[a + (i - 1) * FIELDS + 1] end
  local known = redis.call('HMGET', keys.meta, unpack(ids))
  -- Answers that are held back count too. Otherwise they would grow without bound while the first answer does not come.
  local size = redis.call('ZCARD', keys.queue) + redis.call('HLEN', keys.early)
  local arrived_before = redis.call('INCRBY', keys.number, count) - count
  -- The counter was removed: what is here already came before, under numbers that the clock in ms is above.
  if arrived_before == 0 and redis.call('EXISTS', keys.meta, keys.order) > 0 then
    arrived_before = redis.call('INCRBY', keys.number, redis.call('TIME')[1] .. '000') - count
  end
  local in_level = level_sizes(keys)
  local queue, metas, messages, deadlines, order, early = {}, {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local f = a + (i - 1) * FIELDS
    local level, own, timeout, ordered = ARGV[f + 2], tonumber(ARGV[f + 3]), tonumber(ARGV[f + 4]), ARGV[f + 7] == '1'
    local before = known[i] or ordered and redis.call('HEXISTS', keys.early, id) == 1
    local answer = not before and looked_up(f) or nil
    local is_full = bound > 0 and size >= bound and not (answer and not ordered)
    -- An answer that nobody gets, as there is no room to hold it back, counts for nothing.
    if not (before or answer and is_full) then count_lookup(f, counts, answer) end
    if before then
      results[#results + 1] = 1
    elseif answer and not ordered then
      results[#results + 1] = answer
    elseif is_full or not answer and own > 0 and in_level(level, 0) >= own then
      results[#results + 1] = 0
    elseif answer then
      append(order, arrived_before + i, id)
      append(early, id, answer)
      size = size + 1
      results[#results + 1] = 1
    else
      local meta = { place = level .. '.0.' .. string.format('%016d', arrived_before + i), arrived = now, deadline = '0',
        action = ARGV[f + 5], rows = ARGV[f + 6], ordered = ordered, lost = 0,
        sent = 0, shape = ARGV[f + 8] }
      if timeout > 0 then
        meta.deadline = string.format('%.0f', now + timeout)
        append(deadlines, meta.deadline, id)
      end
      if own > 0 then in_level(level, 1) end
      if ordered then append(order, arrived_before + i, id) end
      append(queue, 0, member_of(meta, id))
      append(metas, id, meta_text(meta))
      append(messages, id, ARGV[f + 9])
      size = size + 1
      results[#results + 1] = 1
    end
  end
  put('ZADD', keys.queue, queue)
  put('HSET', keys.meta, metas)
  put('HSET', keys.messages, messages)
  put('ZADD', keys.deadlines, deadlines)
  put('ZADD', keys.order, order)
  put('HSET', keys.early, early)
  if #early > 0 then send_ordered(keys) end
  if #queue > 0 then wake(keys) end
end

local queues = (#KEYS - CACHE_KEYS) / (WORK_KEYS + 1)
local results, a = {}, 3
for i = 1, queues do
  local count = tonumber(ARGV[a + 1])
  enqueue(work_keys(i), KEYS[queues * WORK_KEYS + i], a + 1, count, results)
  a = a + 1 + count * FIELDS
end
send_answers()
tally_all()
return results
