-- Moves the entries of an executor's inbox to the places that their sequences' records name. Owners order steps by
-- number, not by their place in a stream, so this may run in pieces, twice, and while new steps arrive. For the same
-- reason it takes no term: whoever calls it, and however late, entries go only to where the records say they belong.
--
-- KEYS   1 the executor's inbox
-- ARGV   1 executor   2 after this entry id   3 how many at most
--        4 1 if the executor lives: then its control messages stay
-- reply  {last entry id looked at, entries looked at, entries left where they are}
-- * An entry of a sequence that the executor still owns (another model's leader has not reclaimed it yet) stays.
-- * An entry of an earlier ownership by the same executor is added again, with the present epoch.
-- * An entry whose sequence has no record any more, or was lost because its record could not be read, or had its id
--   before the present one, is removed, and its caller hears that the sequence is lost. If the step was answered before,
--   the gateway knows the caller no longer.

-- Handles one entry. True if it must stay in this inbox.
local function stays(entry)
  local fields = fields_of(entry)
  local name, _, gateway, token, sid = step_of(fields.a)
  -- A control message.
  if not name then return ARGV[4] == '1' end
  local n, epoch = number(name), number(string.match(fields.o, '^%d+'))
  local got = redis.call('HMGET', BASE .. 'seq:' .. sid, 'st', 'ow', 'ep', 'in', 'sl', 'ck', 'cm', 'fe', 'ca', 'gu',
    'tk', 'vr')
  -- It belongs to no sequence, or to an earlier one of the same id.
  if not got[8] or epoch < number(got[8]) then
    answer(gateway, token, lost_reply())
    return false
  end
  -- The checkpoint covers the step.
  if n <= number(got[6]) then return false end
  if got[1] == 'l' and got[2] == ARGV[1] and number(got[3]) == epoch then return true end
  if got[1] == 'l' then
    hand_over(name, fields, { owner = got[2], epoch = got[3], instance = got[4], slot = got[5], committed = got[7],
      version = got[12], cancelled = got[9], given_up = got[10], lost = got[11] })
  elseif got[1] == 'w' or got[1] == 'm' or got[1] == 'p' then
    redis.call('XADD', parked_of(sid), '*', 'a', fields.a, 'm', fields.m)
  end
  return false
end

local left = 0
local last, looked_at = each_entry(KEYS[1], ARGV[2], tonumber(ARGV[3]), function(entry)
  -- An entry that cannot be read belongs to no sequence, and is removed.
  local is_read, is_kept = pcall(stays, entry)
  if not is_read then count_unreadable(KEYS[1], fault_of(is_kept)) end
  if is_read and is_kept then
    left = left + 1
  else
    redis.call('XDEL', KEYS[1], entry[1])
  end
end)
send_answers()
return { last, looked_at, left }
