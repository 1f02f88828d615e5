-- Gives up requests whose callers have gone, if they are still in the queue. A request that is being run runs on.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 reply   2... ids
-- reply  per request: 1 withdrawn, 0 it is being run, or it was answered

local keys, results = work_keys(1), {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local meta = meta_of(redis.call('HGET', keys.meta, id))
  if meta and redis.call('HEXISTS', keys.held, id) == 0 then
    give_up(keys, id, meta, ARGV[1], 'CANCELED')
    results[i - 1] = 1
  else
    results[i - 1] = 0
  end
end
send_answers()
tally_all()
return results
