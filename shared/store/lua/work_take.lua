-- Takes the requests that an executor has decided to run together: all of them or none.
--
-- KEYS   the queue (shared/store/lua/work.lua)
-- ARGV   1 executor   2 tag of this take   3... ids
-- reply  { id, message, id, message, ... }; empty if one of them is not in the queue any more: pull again
-- atomic a request is taken by one executor; the same tag gets the same again

local keys = work_keys(1)
local again = taken_before(keys, ARGV[1], ARGV[2])
if again then return again end
local ids, members = {}, {}
for i = 3, #ARGV do ids[i - 2] = ARGV[i] end
for i, text in ipairs(redis.call('HMGET', keys.meta, unpack(ids))) do
  local meta = meta_of(text)
  members[i] = meta and member_of(meta, ids[i])
  if not meta or not redis.call('ZSCORE', keys.queue, members[i]) then return {} end
end
return (hold(keys, ARGV[1], ARGV[2], ids, members, true))
