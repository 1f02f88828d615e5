-- Counts the steps that wait with their sequences for a slot, for the metrics.
--
-- KEYS   starts streams of one shard's models
-- ARGV   1 what every key of this shard begins with
-- reply  per stream: version, steps, version, steps, ...
-- The parked steps' keys follow from the stream's entries; they carry the hash tag of the declared keys.

local results = {}
for i, starts in ipairs(KEYS) do
  local versions, counts, seen = {}, {}, {}
  for _, entry in ipairs(redis.call('XRANGE', starts, '-', '+')) do
    local fields = {}
    for f = 1, #entry[2], 2 do fields[entry[2][f]] = entry[2][f + 1] end
    if fields.q and not seen[fields.q] then
      seen[fields.q] = true
      local version = fields.v or redis.call('HGET', ARGV[1] .. 'seq:' .. fields.q, 'vr') or ''
      if not counts[version] then
        counts[version] = 0
        versions[#versions + 1] = version
      end
      counts[version] = counts[version] + redis.call('XLEN', ARGV[1] .. 'parked:' .. fields.q)
    end
  end
  local flat = {}
  for _, version in ipairs(versions) do
    flat[#flat + 1] = version
    flat[#flat + 1] = counts[version]
  end
  results[i] = flat
end
return results
