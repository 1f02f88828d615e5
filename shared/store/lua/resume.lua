-- Resumes paused sequences: those with open steps wait for a slot at once, before new sequences.
--
-- KEYS   per sequence: its record
-- reply  per sequence: 1 resumed, 0 it is not paused
-- Safe to repeat.

local function resume(keys, sid)
  return redis.call('HGET', keys.record, 'be') == NO_ENTRY and go_on(keys, sid) or 0
end

return for_each(0, 0, 0, resume, 0)
