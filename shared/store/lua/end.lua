-- Ends sequences: an operator or a client wants it, or nothing comes to them any more in their ensemble. A sequence
-- accepts nothing but a START from now on. Its open steps are run and answered; then it has no idle time left, and its
-- model's leader ends it (`expire`). One that is paused is resumed, so that its steps are run. One that waits for its
-- first slot is refused with all of its steps, if there is a reply for them; else they too are run when it has a slot.
-- One that an operator gives up (state o) is over at once, as one whose record cannot be read.
--
-- KEYS   per sequence: its record
-- ARGV   1 state of its tombstone   2 encoded reply for the steps of a waiting sequence, or ''
--        per sequence: run (as `submit` names it) or '' for whatever run it is in
-- reply  per sequence: 3 it ends when its open steps have been answered   2 it was waiting or given up, and is over
--        1 it has no open step and ends now   0 there is none, it is over already, or in another run
-- Safe to repeat.

local KIND, REPLY = ARGV[1], ARGV[2]
local GIVEN_UP = 'an operator has given the sequence up'

local function end_sequence(keys, sid, run)
  local got = redis.call('HMGET', keys.record, 'st', 'nx', 'cm', 'sn', 'vr', 'be', 'bn')
  local state, accepted, committed = got[1], tonumber(got[2]), tonumber(got[3])
  if not state or TOMBSTONES[state] then return 0 end
  if KIND == 'o' then error(GIVEN_UP) end
  if not is_sound(state, accepted, committed, tonumber(got[4]), got[5]) then error(NOT_SOUND) end
  if run ~= '' and run ~= (got[7] or '') .. '.' .. got[4] then return 0 end
  if state == 'w' and REPLY ~= '' then
    refuse_waiting(keys, sid, REPLY, 'CANCELED')
    tell_leader(model_of(sid), 'q', sid, 'e', 0, 'k', KIND, 'b', got[6])
    return 2
  end
  if got[6] == NO_ENTRY then go_on(keys, sid) end
  redis.call('HSET', keys.record, 'cl', 1, 'en', accepted .. ' ' .. KIND, 'og', 1)
  if accepted ~= committed then return 3 end
  if redis.call('PTTL', keys.idle) > 1 then
    redis.call('PEXPIRE', keys.idle, 1)
    look_by(sid, clock_ms() + 1)
  end
  return 1
end

local results = for_each(0, 2, 1, end_sequence, KIND == 'o' and 2 or 0)
tally_all()
return results
