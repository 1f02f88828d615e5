-- The callers of accepted steps have gone: a step that has not begun to run need not run any more (triton-spec 1.8).
--
-- KEYS   per step: the record of its sequence
-- ARGV   1 encoded reply
--        per step: birth of the sequence, step, gateway, token
-- reply  per step: 2 the sequence was waiting, and all of it was cancelled
--                  1 its owner was told, or the next owner will be told
--                  0 it was answered, or the sequence is over
--                 -1 another caller waits for the same step
-- atomic everything of one step. A sequence with an owner is not changed: only its owner knows whether the step has
-- begun to run, and `commit` makes it final. Safe to repeat.

local function callers(list)
  local _, count = string.gsub(list, ';', '')
  return count
end

-- Notes that a caller has left. True when every caller has left: the first one, and all that joined by a retry.
-- (Gateways do not withdraw a caller that joined, because it can ask again.)
local function leave(record, n, caller)
  local got = redis.call('HMGET', record, 'j:' .. n, 'a:' .. n)
  local left = got[2] or ''
  if not string.find(left, caller, 1, true) then left = left .. caller end
  if callers(left) > callers(got[1] or '') then return true end
  redis.call('HSET', record, 'a:' .. n, left)
  return false
end

local function cancel(keys, sid, birth, step, gateway, token)
  local n = tonumber(step)
  local got = redis.call('HMGET', keys.record, 'st', 'bn', 'cm', 'nx', 'sn', 'ow', 'ep', 'be', 'ca')
  local state = got[1]
  -- Another birth: a later sequence of the same id.
  if got[2] ~= birth or n <= number(got[3]) or n > number(got[4]) then return 0 end
  if state ~= 'w' and state ~= 'l' and state ~= 'm' then return 0 end
  if listed(got[9], n) then return 1 end
  if not leave(keys.record, n, gateway .. ' ' .. token .. ';') then return -1 end
  if state == 'w' and number(got[5]) == 1 then
    refuse_waiting(keys, sid, ARGV[1], 'CANCELED')
    -- A leader that is not told finds out when it assigns the sequence.
    tell_leader(model_of(sid), 'q', sid, 'e', 0, 'k', 'c', 'b', got[8])
    return 2
  end
  redis.call('HSET', keys.record, 'ca', got[9] and (got[9] .. ' ' .. n) or n)
  if state == 'l' then
    redis.call('XADD', BASE .. 'inbox:' .. got[6], '*', 'k', 'cancelled', 'q', sid, 'e', got[7], 's', n)
  end
  return 1
end

local results = for_each(0, 1, 4, cancel, 0)
tally_all()
return results
