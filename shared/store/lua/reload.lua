-- Ends the sequences whose state comes from another load of the model than the served one. Only a sequence between two
-- steps is ended here, and what the executor's inbox holds for a replay of it is removed. A sequence with an open step is
-- ended by the new load, which refuses the state.
--
-- KEYS   1 owned sequences   2 deadlines   3 feed
--        per sequence: its record
-- ARGV   1 executor   2 model version   3 mark of the load that is served now, '' if none is   4 tombstone ms
-- reply  per sequence: 1 ended, 0 it goes on: it has the mark of this load, an open step, or another owner
-- Safe to repeat.

local function is_outdated(record)
  local got = redis.call('HMGET', record, 'st', 'ow', 'vr', 'nx', 'cm', 'mk', 'ep')
  local held = got[1] == 'l' and got[2] == ARGV[1] and got[3] == ARGV[2] and got[4] == got[5]
  return held and got[6] and got[6] ~= ARGV[3] and got[7]
end

local results, inbox = {}, BASE .. 'inbox:' .. ARGV[1]
for i = 1, #KEYS - 3 do
  local keys = sequence_keys(KEYS[3 + i])
  keys.owned, keys.deadlines, keys.feed = KEYS[1], KEYS[2], KEYS[3]
  local epoch, sid = is_outdated(keys.record), id_of(keys.record)
  if epoch then
    release(keys, sid, 'o', epoch, ARGV[2], ARGV[4])
    for _, step in ipairs(steps_in(inbox, sid)) do redis.call('XDEL', inbox, step.entry) end
  end
  results[i] = epoch and 1 or 0
end
return results
