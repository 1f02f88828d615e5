-- Gives up requests whose callers have gone, if they are still in the queue. A request that is being run runs on.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 prefix of this shard's reply streams   2 reply   3... ids
-- reply  per request: 1 withdrawn, 0 it is being run, or it was answered

local keys, now, results = work_keys(1), now_us(), {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local text = redis.call('HGET', keys.meta, id)
  local meta = meta_of(text)
  if meta and redis.call('HEXISTS', keys.held, id) == 0 then
    give_up(keys, id, meta, ARGV[2])
    tally_refused(KEYS[WORK_KEYS + 1], 'CANCELED', math.floor((now - meta.arrived) / 1000))
    results[i - 2] = 1
  else
    results[i - 2] = 0
  end
end
send_answers(ARGV[1])
tally_all()
return results
