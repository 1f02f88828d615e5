-- Takes sequences between two steps out of their slots on executors that live. A sequence is paged until its next step
-- comes, or moves to another slot at once. Its owner is told; from here on the owner's commits are refused. A paged
-- sequence can be moved too: it gets a slot without a step.
--
-- KEYS   1 fence of the model   2 epoch counter of the shard   3 starts stream   4 counts of the waiting line
--        per sequence: record
-- ARGV   1 term   2 prefix of this shard's inboxes   3 prefix of the owned sets (executor, model follow)   4 model
--        per sequence: sequence id, epoch in which it was seen (0: paged), p (page it) or m (move it)
-- reply  per sequence:
--        0 it keeps its slot: it has an open step, another epoch, or a state that only its owner holds
--        1 it has no slot any more
--        2 it has no slot any more, and its owner's inbox holds steps since its checkpoint: `drain` the inbox
-- The owner's inbox and owned set follow from the record; they carry the hash tag of the declared keys.
-- Safe to repeat: a sequence that was taken has another state or epoch.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local function vacate(record, sid, epoch, state)
  local got = redis.call('HMGET', record, 'st', 'ow', 'ep', 'nx', 'cm', 'ck', 'du', 'pg', 'vr')
  if got[1] == 'p' and epoch == '0' and state == 'm' then
    move_on(record, KEYS[3], KEYS[2], sid, got[9])
    count_line(KEYS[4], 'in:' .. got[9], 1)
    return 1
  end
  if got[1] ~= 'l' or got[3] ~= epoch or got[4] ~= got[5] or got[7] ~= '1' then return 0 end
  if state == 'p' and not got[8] then return 0 end
  redis.call('SREM', ARGV[3] .. got[2] .. ':' .. ARGV[4], sid)
  redis.call('XADD', ARGV[2] .. got[2], '*', 'k', 'vacated', 'q', sid, 'e', epoch)
  if state == 'p' then
    page(record, KEYS[4], got[9])
  else
    move_on(record, KEYS[3], KEYS[2], sid, got[9])
    count_line(KEYS[4], 'moved:' .. got[9], 1)
  end
  return got[5] == got[6] and 1 or 2
end

local results = {}
for i = 1, #KEYS - 4 do
  local a = 4 + (i - 1) * 3
  local done, code = for_one(KEYS[4 + i], vacate, KEYS[4 + i], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
  results[i] = done and code or 0
end
return results
