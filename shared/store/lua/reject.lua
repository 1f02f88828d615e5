-- Ends sequences that wait for a slot, whether new or between two owners. Every step parked for them gets the same
-- error, and no record stays.
--
-- KEYS   1 fence of the model   2 starts stream   3 counts of the waiting line
--        per sequence: record, parked steps, idle marker, checkpoint
-- ARGV   1 term   2 prefix of this shard's reply streams   3 prefix of the model's tallies of refused requests
--        per sequence: entry id of its wait, encoded reply
-- reply  per sequence: steps answered; -1 if it does not wait under that entry any more
-- Reply streams follow from the parked steps, tallies from the record; they carry the hash tag of the declared keys.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local function reject(keys, entry, reply)
  local got = redis.call('HMGET', keys.record, 'st', 'be')
  if (got[1] ~= 'w' and got[1] ~= 'm') or got[2] ~= entry then return -1 end
  return refuse_waiting(keys, ARGV[2], reply, function(version, ms)
    tally_refused(ARGV[3] .. version, 'REJECTED', ms)
  end)
end

local results = {}
for i = 1, (#KEYS - 3) / 4 do
  local k, a = 3 + (i - 1) * 4, 3 + (i - 1) * 2
  local keys = { record = KEYS[k + 1], parked = KEYS[k + 2], idle = KEYS[k + 3], checkpoint = KEYS[k + 4],
    starts = KEYS[2], line = KEYS[3] }
  local done, answered = for_one(keys.record, reject, keys, ARGV[a + 1], ARGV[a + 2])
  results[i] = done and answered or -1
end
tally_all()
return results
