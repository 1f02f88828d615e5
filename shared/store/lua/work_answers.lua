-- Writes answers of requests that this executor holds, but not their last ones: the requests of decoupled models. An
-- answer whose number was written before is left out, so an executor that runs a request again writes none twice.
-- Without answers it only asks what became of the requests.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 executor
--        per request: id, number of answers, per answer: its number (from 1, rising), reply
-- reply  per request: 1 written, 2 written, and its callers have gone, 0 this executor does not hold it
-- atomic everything of one request. The last answer of a request is written by `work_finish`.

local keys = work_keys(1)

local function write(id, first, last)
  local meta = redis.call('HGET', keys.held, id) == ARGV[1] and meta_of(redis.call('HGET', keys.meta, id))
  if not meta then return 0 end
  local before = meta.sent
  for a = first, last, 2 do
    local nth = tonumber(ARGV[a])
    if nth > meta.sent then
      meta.sent = nth
      send(id, ARGV[a + 1])
    end
  end
  if meta.sent > before then redis.call('HSET', keys.meta, id, meta_text(meta)) end
  return meta.action == 'C' and 2 or 1
end

local results, a = {}, 2
while a <= #ARGV do
  local last = a + 1 + 2 * ARGV[a + 1]
  results[#results + 1] = write(ARGV[a], a + 2, last)
  a = last + 1
end
send_answers()
return results
