-- Gives waiting or moving sequences an owner and a slot. Their parked steps go to the owner's inbox, in order. If a
-- sequence has no parked step, its owner is told of it all the same, so that the state is loaded before the next step.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term, then per sequence: entry id of its wait, executor, instance, slot
-- reply  per sequence its new epoch, or 0 if it does not wait under that entry any more
-- atomic epoch, owner and the move of every parked step. Callers that asked (flag 128) are told how long it waited

-- Tells the caller of a step that has asked for it how long the step has waited; packed as a ReplyMessage of
-- shared/contract/messages.py is. entry: the step's among the parked ones
local function tell_waited(gateway, token, entry)
  local waited = math.max(0, clock_ms() - number(string.match(entry, '^%d+')))
  answer(gateway, token, cmsgpack.pack({ '', {}, '', '', '', 0, '', { sequence_waited_ms = waited }, 0, false,
    false, true }))
end

local function assign(keys, sid, waits, executor, instance, slot)
  local record, parked, inbox = keys.record, keys.parked, BASE .. 'inbox:' .. executor
  local got = redis.call('HMGET', record, 'st', 'be', 'cm', 'vr', 'ca', 'dn', 'gu', 'nx', 'tk', 'ow')
  -- Parked steps without a record: the record was removed, not ended.
  if got[1] and not is_sound(got[1], tonumber(got[8]), tonumber(got[3]), 0, got[4])
    or not got[1] and redis.call('EXISTS', parked) == 1 then
    error(NOT_SOUND)
  end
  if (got[1] ~= 'w' and got[1] ~= 'm') or got[2] ~= waits then
    return 0
  end
  local epoch = redis.call('INCR', EPOCHS)
  redis.call('HSET', record, 'st', 'l', 'ow', executor, 'in', instance, 'sl', slot, 'ep', epoch)
  -- Only the first owner's epoch is kept here.
  redis.call('HSETNX', record, 'fe', epoch)
  redis.call('HDEL', record, 'be', 'dl', 'dn')
  -- A paged sequence keeps its last owner's name.
  local cause = got[1] == 'w' and 'start' or got[10] and 'page' or 'takeover'
  tally_slot_wait(MODEL, got[4], cause, math.max(0, clock_ms() - number(string.match(waits, '^%d+'))))
  local committed = number(got[3])
  leave_line(LINE, got[1], got[4], number(got[8]), committed)
  redis.call('XDEL', STARTS, waits, got[6] or waits)
  redis.call('SADD', owned_by(executor, MODEL), sid)
  local owned = { owner = executor, epoch = epoch, instance = instance, slot = slot, committed = got[3], version = got[4],
    cancelled = got[5], given_up = got[7], lost = got[9] }
  local _, steps = each_entry(parked, '0-0', math.huge, function(entry)
    local fields = fields_of(entry)
    local n, flags, gateway, token = step_of(fields.a)
    if has(number(flags), TOLD) then tell_waited(gateway, token, entry[1]) end
    hand_over(n, fields, owned)
  end)
  redis.call('DEL', parked)
  -- Its first slot, or its first since it was paged: no open step lies elsewhere. One that is not there never runs.
  if (got[1] == 'w' or got[10]) and steps < number(got[8]) - committed then error(NOT_SOUND) end
  if steps == 0 and number(got[8]) == committed then
    redis.call('XADD', inbox, '*', 'k', 'owned', 'q', sid, 'e', epoch, 'i', instance, 'l', slot, 'c', committed,
      'v', got[4])
  end
  return epoch
end

local epochs = for_each(MODEL_KEYS, 1, 4, assign, 0)
for i, epoch in ipairs(epochs) do
  -- No sequence waits under that entry: it is removed, or the leader would read it again.
  local waits = ARGV[1 + (i - 1) * 4 + 1]
  if epoch == 0 and string.find(waits, '^%d+%-%d+$') then redis.call('XDEL', STARTS, waits) end
end
tally_all()
send_answers()
return epochs
