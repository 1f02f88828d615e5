-- Puts everything that an executor holds back at its old place: it is dead, or it leaves. What its tags got is forgotten.
-- A request that had left the queue in time is not late any more: it has no deadline from here on.
--
-- What a dead executor was running may be what it died of. With the second executor that is lost a request shares no
-- batch any more, so that it takes no others down with it; with the last one it is answered.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 executor   2 executors that a request may take down, 0: this one leaves, it is not lost
--        3 prefix of this shard's reply streams   4 answer of a request that has taken down so many
-- reply  number of requests that it held

local ALONE_FROM = 2

local keys, lost_max, now = work_keys(1), tonumber(ARGV[2]), now_us()

-- Whether a request of a dead executor is to be tried again.
local function survives(id, meta)
  meta.lost = meta.lost + 1
  if meta.lost >= lost_max then
    give_up(keys, id, meta, ARGV[4])
    tally_refused(KEYS[WORK_KEYS + 1], 'BACKEND', math.floor((now - meta.arrived) / 1000))
    return false
  end
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
    elseif lost_max == 0 or survives(id, meta) then
      redis.call('ZADD', keys.queue, 0, member_of(meta, id))
      queued = queued + 1
    end
  end
end
if queued > 0 then wake(keys) end
send_answers(ARGV[3])
tally_all()
return count
