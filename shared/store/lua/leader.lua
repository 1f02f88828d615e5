-- Prelude of the scripts of a model's leader. An older leader is refused before anything is changed: error FENCED.
--
-- KEYS   1 fence of the model   2 epoch counter of the shard   3 starts stream   4 feed   5 deadlines
--        6 counts of the waiting line   (3 to 6 of the model in this shard)   then those of the script
-- ARGV   1 term of the leader   then those of the script

local MODEL_KEYS = 6
local EPOCHS, STARTS, FEED, DEADLINES, LINE
local MODEL

-- A sequence has lost its owner. Its entry is of kind m, which is served before new sequences; `assign` gives it the
-- next owner.
local function move_on(record, sid, version)
  local entry = line_up(sid, 'm', version, '0', tenant_of(record))
  redis.call('HSET', record, 'st', 'm', 'be', entry, 'ep', redis.call('INCR', EPOCHS))
  redis.call('HDEL', record, 'ow', 'in', 'sl')
end

-- each call
EPOCHS, STARTS, FEED, DEADLINES, LINE = unpack(KEYS, 2, MODEL_KEYS)
MODEL = string.match(STARTS, '}:starts:(.*)$')
local seen, term = number(redis.call('GET', KEYS[1])), tonumber(ARGV[1])
if seen > term then
  return redis.error_reply(string.format('FENCED term %.0f is older than %.0f', term, seen))
end
if seen < term then redis.call('SET', KEYS[1], term) end
