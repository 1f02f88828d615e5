-- Prelude of the scripts that answer requests: the statistics are written with the answer, so each answer counts once.
--
-- Counts are packed by shared/statistics/tally.py (msgpack array: field, increment, field, increment, ...). Here they
-- are only appended to the model version's tally (list). `total` adds many of them up later, into the hash of counts.
-- One RPUSH per call costs a tenth of the increments of a dozen fields.

local TALLY_TTL_MS = 86400000

local tallies, tally_keys = {}, {}

-- Collects the counts of one request, or of one execution of the model. '' counts nothing.
local function tally(key, packed)
  if packed == '' then return end
  local counts = tallies[key]
  if not counts then
    counts = {}
    tallies[key] = counts
    tally_keys[#tally_keys + 1] = key
  end
  counts[#counts + 1] = packed
end

-- Counts a request that the script itself refuses.
-- reason: as in shared/statistics/tally.py; ms: since it was accepted
local function tally_refused(key, reason, ms)
  tally(key, cmsgpack.pack({ 'fail_count', 1, 'fail_ns', math.max(0, ms) * 1000000, 'fail_' .. reason, 1 }))
end

-- To be called once, at the end of the script. A tally that was empty is new, and gets its TTL here.
local function tally_all()
  for _, key in ipairs(tally_keys) do
    local counts = tallies[key]
    if redis.call('RPUSH', key, unpack(counts)) == #counts then
      redis.call('PEXPIRE', key, TALLY_TTL_MS)
    end
  end
end
