-- Takes sequences between two steps out of their slots on executors that live. A sequence is paged until its next step
-- comes, or moves to another slot at once. Its owner is told; from here on the owner's commits are refused. A paged
-- sequence can be moved too: it gets a slot without a step.
--
-- KEYS   those of leader.lua, then per sequence: its record
-- ARGV   1 term, then per sequence: epoch in which it was seen (0: paged), 1 (move it) or 0 (page it)
-- reply  per sequence:
--        0 it keeps its slot: it has an open step, another epoch, or a state that only its owner holds
--        1 it has no slot any more
--        2 it has no slot any more, and its owner's inbox holds steps since its checkpoint: `drain` the inbox
-- Safe to repeat: a sequence that was taken has another state or epoch.

local function vacate(keys, sid, epoch, moving)
  local record, is_moving = keys.record, moving == '1'
  local got = redis.call('HMGET', record, 'st', 'ow', 'ep', 'nx', 'cm', 'ck', 'du', 'pg', 'vr')
  if got[1] == 'p' and epoch == '0' and is_moving then
    move_on(record, sid, got[9])
    count_line(LINE, 'in:' .. got[9], 1)
    return 1
  end
  if got[1] ~= 'l' or got[3] ~= epoch or got[4] ~= got[5] or got[7] ~= '1' then return 0 end
  if not (is_moving or got[8]) then return 0 end
  redis.call('SREM', owned_by(got[2], MODEL), sid)
  redis.call('XADD', BASE .. 'inbox:' .. got[2], '*', 'k', 'vacated', 'q', sid, 'e', epoch)
  if is_moving then
    move_on(record, sid, got[9])
    count_line(LINE, 'moved:' .. got[9], 1)
  else
    page(record, LINE, got[9])
  end
  return got[5] == got[6] and 1 or 2
end

return for_each(MODEL_KEYS, 1, 2, vacate, 0)
