-- The callers of accepted steps have gone: a step that has not begun to run need not run any more (triton-spec 1.8).
--
-- KEYS   per step: record, parked steps, idle marker, checkpoint, starts stream and feed of the model, counts of its
--        waiting line
-- ARGV   1 prefix of this shard's reply streams   2 prefix of its inboxes   3 bound of the feed   4 encoded reply
--        per step: sequence id, birth of the sequence, step, gateway, token, prefix of its model's tallies of refused
--                  requests
-- reply  per step: 2 the sequence was waiting, and all of it was cancelled
--                  1 its owner was told, or the next owner will be told
--                  0 it was answered, or the sequence is over
--                 -1 another caller waits for the same step
-- atomic everything of one step. A sequence with an owner is not changed: only its owner knows whether the step has
-- begun to run, and `commit` makes it final. Safe to repeat.
-- Reply streams, inboxes and tallies follow from the record and the parked steps; they carry the hash tag of the
-- declared keys.

local function callers(list)
  local _, count = string.gsub(list, ';', '')
  return count
end

-- Notes that a caller has left. True when every caller has left: the first one, and all that joined by a retry.
-- (Gateways do not withdraw a caller that joined, because it can ask again.)
local function leave(keys, step)
  local got = redis.call('HMGET', keys.record, 'j:' .. step.n, 'a:' .. step.n)
  local left, place = got[2] or '', step.gateway .. ' ' .. step.token .. ';'
  if not string.find(left, place, 1, true) then left = left .. place end
  if callers(left) > callers(got[1] or '') then return true end
  redis.call('HSET', keys.record, 'a:' .. step.n, left)
  return false
end

local function cancel(keys, step)
  local got = redis.call('HMGET', keys.record, 'st', 'bn', 'cm', 'nx', 'sn', 'ow', 'ep', 'be', 'ca')
  local state = got[1]
  -- Another birth: a later sequence of the same id.
  if got[2] ~= step.birth or step.n <= number(got[3]) or step.n > number(got[4]) then return 0 end
  if state ~= 'w' and state ~= 'l' and state ~= 'm' then return 0 end
  if listed(got[9], step.n) then return 1 end
  if not leave(keys, step) then return -1 end
  if state == 'w' and number(got[5]) == 1 then
    refuse_waiting(keys, ARGV[1], ARGV[4], function(version, ms)
      tally_refused(step.tallies .. version, 'CANCELED', ms)
    end)
    -- A leader that is not told finds out when it assigns the sequence. So the feed may have a bound here.
    if redis.call('XLEN', keys.feed) < tonumber(ARGV[3]) then
      redis.call('XADD', keys.feed, '*', 'q', step.sid, 'e', 0, 'k', 'c', 'b', got[8])
    end
    return 2
  end
  redis.call('HSET', keys.record, 'ca', got[9] and (got[9] .. ' ' .. step.n) or step.n)
  if state == 'l' then
    redis.call('XADD', ARGV[2] .. got[6], '*', 'k', 'cancelled', 'q', step.sid, 'e', got[7], 's', step.n)
  end
  return 1
end

local results = {}
for i = 1, #KEYS / 7 do
  local k, a = (i - 1) * 7, 4 + (i - 1) * 6
  local done, code = for_one(KEYS[k + 1], cancel, { record = KEYS[k + 1], parked = KEYS[k + 2], idle = KEYS[k + 3], checkpoint = KEYS[k + 4],
    starts = KEYS[k + 5], feed = KEYS[k + 6], line = KEYS[k + 7] },
    { sid = ARGV[a + 1], birth = ARGV[a + 2], n = tonumber(ARGV[a + 3]), gateway = ARGV[a + 4], token = ARGV[a + 5],
      tallies = ARGV[a + 6] })
  results[i] = done and code or 0
end
tally_all()
return results
