-- Prelude of the scripts that answer requests: statistics leave with the answer, so that they count it exactly once.
--
-- Counts are packed by shared/statistics/tally.py (msgpack array: field, increment, field, increment, ...) and only appended here,
-- to the model version's tally (list). `total` adds a tally up into the hash of counts, later, many at once: one RPUSH
-- per call costs an answer a tenth of what it costs to increment a dozen fields.

local TALLY_TTL_MS = 86400000

local tallies, tally_keys = {}, {}

-- Counts of one request, or of one execution of the model. '' counts nothing.
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

-- A request that a script itself refuses. reason: as in shared/statistics/tally.py; ms: since it was accepted.
local function tally_refused(key, reason, ms)
  tally(key, cmsgpack.pack({ 'fail_count', 1, 'fail_ns', math.max(0, ms) * 1000000, 'fail_' .. reason, 1 }))
end

-- To be called once, at the end of the script. A tally that was empty is new: nobody has given it its TTL yet.
local function tally_all()
  for _, key in ipairs(tally_keys) do
    local counts = tallies[key]
    if redis.call('RPUSH', key, unpack(counts)) == #counts then
      redis.call('PEXPIRE', key, TALLY_TTL_MS)
    end
  end
end
