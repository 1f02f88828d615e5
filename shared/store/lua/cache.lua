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

-- Renews the TTL only when half of it is over. With every use it would be three more commands to write and to
-- replicate.
local function cache_renew(cache)
  if redis.call('PTTL', cache.about) > CACHE_TTL_MS / 2 then return end
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

-- Stores an answer. The answers that were not used for longest give way until the cache is within its bound.
local function cache_put(cache, name, reply, bound, now)
  if #reply + #name > bound then return end
  if redis.call('EXISTS', cache.entries, cache.used, cache.about) < CACHE_KEYS then
    -- The cache is new, or Redis, short of memory, has evicted one of its keys. A part of it counts wrong, so it begins
    -- again.
    redis.call('DEL', cache.entries, cache.used, cache.about)
  end
  local total = redis.call('HINCRBY', cache.about, 'bytes', #reply + #name - cache_size(cache, name))
  redis.call('HSET', cache.entries, name, reply)
  redis.call('ZADD', cache.used, string.format('%.0f', now), name)
  while total > bound do
    local oldest = redis.call('ZRANGE', cache.used, 0, 0)[1]
    if not oldest then
      -- The sum of bytes says that entries are there, and none is: begin again.
      redis.call('DEL', cache.entries, cache.used, cache.about)
      return
    end
    total = redis.call('HINCRBY', cache.about, 'bytes', -cache_size(cache, oldest))
    redis.call('HINCRBY', cache.about, 'evicted', 1)
    redis.call('HDEL', cache.entries, oldest)
    redis.call('ZREM', cache.used, oldest)
  end
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
