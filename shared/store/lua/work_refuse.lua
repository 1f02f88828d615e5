-- Gives up the front of a queue that no executor serves any more, because its model was unloaded.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 reply   2 how many at most
-- reply  number of requests that were answered; call again until it is 0
-- A request that an executor still holds is answered by that executor. With the last request the counter goes, too.

local keys = work_keys(1)
local members = redis.call('ZRANGE', keys.queue, 0, tonumber(ARGV[2]) - 1)
for _, member in ipairs(members) do
  local id = id_in(member)
  local meta = meta_of(redis.call('HGET', keys.meta, id))
  if meta and member_of(meta, id) == member then
    give_up(keys, id, meta, ARGV[1], 'OTHER')
  else
    give_up_unreadable(keys, id, member)
  end
end
redis.call('DEL', keys.wake)
-- Nothing waits and nothing runs: what comes later need not stand behind anything.
if redis.call('EXISTS', keys.meta, keys.order) == 0 then redis.call('DEL', keys.number) end
send_answers()
tally_all()
return #members
