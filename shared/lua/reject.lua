-- Ends sequences that wait for a slot: every step parked for them gets the same error, and no record stays.
--
-- KEYS   1 fence of the model   2 starts stream   per sequence: record, parked steps, idle marker, checkpoint
-- ARGV   1 term   2 prefix of this shard's reply streams   per sequence: sequence id, encoded reply
-- reply  per sequence: steps answered; -1 when it does not wait (any more)
-- Reply streams follow from the parked steps; they carry the hash tag of the declared keys.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local function reject(record, parked, idle, checkpoint, reply)
  local got = redis.call('HMGET', record, 'st', 'be')
  if got[1] ~= 'w' then return -1 end
  local steps = redis.call('XRANGE', parked, '-', '+')
  for _, entry in ipairs(steps) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    redis.call('XADD', ARGV[2] .. fields.g, 'NOMKSTREAM', '*', fields.t, reply)
    local joined = redis.call('HGET', record, 'j:' .. fields.n)
    if joined then
      for gateway, token in string.gmatch(joined, '(%S+) (%S+);') do
        redis.call('XADD', ARGV[2] .. gateway, 'NOMKSTREAM', '*', token, reply)
      end
    end
  end
  redis.call('XDEL', KEYS[2], got[2])
  redis.call('DEL', record, parked, idle, checkpoint)
  return #steps
end

local results = {}
for i = 1, (#KEYS - 2) / 4 do
  local k, a = 2 + (i - 1) * 4, 2 + (i - 1) * 2
  results[i] = reject(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4], ARGV[a + 2])
end
return results
