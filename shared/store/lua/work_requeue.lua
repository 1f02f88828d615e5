-- Puts every request that an executor holds back into its old place of the queue, because the executor is dead or
-- leaves. A take of this executor that is sent again gets nothing.
-- One whose callers have gone is given up.
-- A request that had left the queue in time cannot be late any more: it has no deadline from here on.
--
-- A dead executor may have died of a request that it was running. After the second executor lost with it, a request
-- shares no batch any more, so that it harms no other request. After the last one it is answered with an error.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 executor   2 executors that may be lost with one request; 0: this executor leaves, it is not lost
--        3 answer of a request with which so many were lost
-- reply  number of requests that the executor held

local ALONE_FROM = 2

local keys, lost_max = work_keys(1), tonumber(ARGV[2])

-- Counts the dead executor for this request. False if the request is given up for it.
local function survives(id, meta)
  meta.lost = meta.lost + 1
  if meta.lost >= lost_max then
    give_up(keys, id, meta, ARGV[3], 'BACKEND')
    return false
  end
  -- Only requests of one shape share a batch, and no other request has this one.
  if meta.lost >= ALONE_FROM then meta.shape = 'alone:' .. id end
  redis.call('HSET', keys.meta, id, meta_text(meta))
  return true
end

redis.call('HDEL', keys.takers, ARGV[1])
local held = redis.call('HGETALL', keys.held)
local count, queued = 0, 0
for i = 1, #held, 2 do
  if held[i + 1] == ARGV[1] then
    local id = held[i]
    local meta = meta_of(redis.call('HGET', keys.meta, id))
    redis.call('HDEL', keys.held, id)
    count = count + 1
    if not meta then
      give_up_unreadable(keys, id)
    elseif (lost_max == 0 or survives(id, meta)) and put_back(keys, id, meta) then
      queued = queued + 1
    end
  end
end
if queued > 0 then wake(keys) end
send_answers()
tally_all()
return count
