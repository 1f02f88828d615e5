-- Prelude of the scripts that answer from the response cache (`work_enqueue`) or fill it (`work_finish`).
--
-- A shard has one cache for all models whose work lies there:
-- entries  hash: name -> encoded answer
-- used     sorted set: name -> last use, us
-- about    hash: `bytes` of all entries, `evicted`: how many had to make room
-- They end together, at most a day after the last use of any entry.

local CACHE_KEYS = 3
local CACHE_TTL_MS = 86400000

local function cache_keys()
  local first = #KEYS - CACHE_KEYS + 1
  return { entries = KEYS[first], used = KEYS[first + 1], about = KEYS[first + 2] }
end

-- Renews the TTL only when half of it is over, or the first answer has come. With every use it would be three more
-- commands to write and to replicate.
local function cache_renew(cache)
  if redis.call('PTTL', cache.entries) > CACHE_TTL_MS / 2 then return end
  for _, key in pairs(cache) do redis.call('PEXPIRE', key, CACHE_TTL_MS) end
end

-- The answer stored under a name, nil if there is none.
local function cache_get(cache, name, now)
  local reply = redis.call('HGET', cache.entries, name)
  if not reply then return nil end
  redis.call('ZADD', cache.used, string.format('%.0f', now), name)
  cache_renew(cache)
  return reply
end

local function cache_size(cache, name)
  local length = redis.call('HSTRLEN', cache.entries, name)
  return length > 0 and length + #name or 0
end

-- Answers that give way in one call: a cache of very many small ones, or whose bound was lowered, takes several.
local EVICTED_MAX = 1000

-- Removes an answer, if it is there. Returns the bytes of all others.
local function cache_remove(cache, name)
  -- Not by a minus sign: of 0 Lua makes -0, which Redis 7.0 takes for no integer.
  local total = redis.call('HINCRBY', cache.about, 'bytes', 0 - cache_size(cache, name))
  redis.call('HDEL', cache.entries, name)
  redis.call('ZREM', cache.used, name)
  return total
end

-- Stores an answer in the place of an older one. Those that were not used for longest give way until the cache is
-- within its bound.
local function cache_put(cache, name, reply, bound, now)
  local size = #reply + #name
  if size > bound then return end
  -- The cache is new; or Redis, short of memory, has evicted one of its keys; or the sum of bytes says that entries are
  -- there, and none is; or it is less than none. A part of it counts wrong, so it begins again.
  local is_whole = redis.call('EXISTS', cache.entries, cache.used, cache.about) == CACHE_KEYS
  local total = cache_remove(cache, name)
  if not is_whole or total < 0 then
    redis.call('DEL', cache.entries, cache.used, cache.about)
    total = 0
  end
  for _, oldest in ipairs(total + size > bound and redis.call('ZRANGE', cache.used, 0, EVICTED_MAX - 1) or {}) do
    if total + size <= bound then break end
    total = cache_remove(cache, oldest)
    redis.call('HINCRBY', cache.about, 'evicted', 1)
  end
  if total + size > bound then return end
  redis.call('HINCRBY', cache.about, 'bytes', size)
  redis.call('HSET', cache.entries, name, reply)
  redis.call('ZADD', cache.used, string.format('%.0f', now), name)
  cache_renew(cache)
end

-- Counts a lookup (shared/statistics/tally.py says what the fields mean).
-- us: since the request arrived at its gateway; base: of the summaries' buckets
-- (shared/statistics/metrics_config.py), 0: there are no summaries
local function tally_lookup(key, hit, us, base, bucket_max)
  local ns = math.max(0, us) * 1000
  local counts = { 'cache_miss_count', 1, 'cache_miss_ns', ns }
  if hit then counts = { 'success_count', 1, 'success_ns', ns, 'cache_hit_count', 1, 'cache_hit_ns', ns } end
  if base > 0 then
    local bucket = us > 1 and math.min(bucket_max, math.ceil(math.log(us) / math.log(base) - 1e-9)) or 0
    local fields = hit and { request = bucket, queue = 0, cache_hit = bucket } or { cache_miss = bucket }
    for name, at in pairs(fields) do
      counts[#counts + 1] = 'sketch:' .. name .. ':' .. string.format('%d', at)
      counts[#counts + 1] = 1
    end
  end
  tally(key, cmsgpack.pack(counts))
end

-- each call
