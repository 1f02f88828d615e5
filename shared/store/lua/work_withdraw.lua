-- Gives up requests whose callers have gone, or whose timeout has ended, if they are still in the queue. A request that
-- is being run runs on; if its callers have gone, `work_answers` tells its executor. A request that was taken once, and
-- put back, cannot be late any more (work_requeue.lua).
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 reply   2 CANCELED: the callers have gone; REJECTED: the timeout has ended   3... ids
-- reply  per request: 1 withdrawn, 0 it is being run, or it was answered

local keys, reason, results = work_keys(1), ARGV[2], {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local meta = meta_of(redis.call('HGET', keys.meta, id))
  local is_held = meta and redis.call('HEXISTS', keys.held, id) == 1
  if is_held and reason == 'CANCELED' then
    meta.action = 'C'
    redis.call('HSET', keys.meta, id, meta_text(meta))
  end
  if meta and not is_held
    and (reason ~= 'REJECTED' or redis.call('ZSCORE', keys.deadlines, id)) then
    give_up(keys, id, meta, ARGV[1], reason)
    results[i - 2] = 1
  else
    results[i - 2] = 0
  end
end
send_answers()
tally_all()
return results
