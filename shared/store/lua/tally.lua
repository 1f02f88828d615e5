-- Prelude of the scripts that answer requests: the statistics are written with the answer, so each answer counts once.
--
-- Counts are packed by shared/statistics/tally.py (msgpack array: field, increment, field, increment, ...). Here they
-- are only appended to the model version's tally (list). `total` adds many of them up later, into the hash of counts.
-- One RPUSH per call costs a tenth of the increments of a dozen fields.
-- A request that succeeded has numbers alone, whose fields are always the same. Those of one call are added up here.

local TALLY_TTL_MS = 86400000

-- The fields of a request that succeeded (`SUCCESS` of shared/statistics/tally.py), and how msgpack begins an array of so
-- many values. All other counts are pairs, so no array of them is that long.
local SUCCESS = { 'success_count', 'success_ns', 'queue_ns', 'inference_count', 'compute_input_ns', 'compute_infer_ns',
  'compute_output_ns' }
local OF_SUCCESS = 0x90 + #SUCCESS

-- Packed counts by key, and the keys in their order; the sums of the requests that succeeded, by key.
local tallies, tally_keys, successes

-- Collects the counts of one request, or of one execution of the model. '' counts nothing.
local function tally(key, packed)
  if packed == '' then return end
  local counts = tallies[key]
  if not counts then
    counts = {}
    tallies[key] = counts
    tally_keys[#tally_keys + 1] = key
  end
  if string.byte(packed) ~= OF_SUCCESS then
    counts[#counts + 1] = packed
    return
  end
  local numbers, sums = cmsgpack.unpack(packed), successes[key]
  if sums then
    for i = 1, #SUCCESS do sums[i] = sums[i] + numbers[i] end
  else
    successes[key] = numbers
  end
end

-- The sums of a tally as packed counts.
local function packed_sums(sums)
  local flat = {}
  for i, field in ipairs(SUCCESS) do append(flat, field, sums[i]) end
  return cmsgpack.pack(flat)
end

-- Counts a request that the script itself refuses.
-- reason: as in shared/statistics/tally.py; ms: since it was accepted
local function tally_refused(key, reason, ms)
  tally(key, cmsgpack.pack({ 'fail_count', 1, 'fail_ns', math.max(0, ms) * 1000000, 'fail_' .. reason, 1 }))
end

-- Upper ends of the buckets of waits, ms: `SLOT_WAIT_BOUNDS_S` of shared/statistics/meter.py.
local WAIT_BOUNDS = { 5, 10, 50, 100, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000 }

-- Measures how long a sequence has waited for its slot. cause: start, takeover, page
local function tally_slot_wait(model, version, cause, waited)
  local bucket = 0
  while WAIT_BOUNDS[bucket + 1] and waited > WAIT_BOUNDS[bucket + 1] do bucket = bucket + 1 end
  local name = 'slot_wait_' .. cause
  tally(BASE .. 'tally:' .. model .. '::' .. version, cmsgpack.pack({ name .. ':' .. bucket, 1, name .. ':sum', waited }))
end

-- A sequence that waits for a slot leaves the line: each step that is not committed gets the same reply.
-- Committed steps can be parked too (they are kept for a replay); they were answered before.
-- Each step is counted as failed for this reason (shared/statistics/tally.py).
-- Returns the number of steps answered, and the sequence's version.
local function refuse_steps(keys, sid, reply, reason)
  local got = redis.call('HMGET', keys.record, 'be', 'dn', 'vr', 'cm', 'st', 'nx')
  local model, count = model_of(sid), 0
  local function tell(gateway, token)
    redis.call('XADD', BASE .. 'replies:' .. gateway, 'NOMKSTREAM', '*', token, reply)
  end
  each_entry(keys.parked, '0-0', math.huge, function(entry)
    local n, _, gateway, token = step_of(fields_of(entry).a)
    if number(n) <= number(got[4]) then return end
    count = count + 1
    tell(gateway, token)
    local since_ms = tonumber(string.match(entry[1], '^%d+'))
    tally_refused(BASE .. 'tally:' .. model .. '::' .. got[3], reason, clock_ms() - since_ms)
  end)
  -- Those who asked again, and stand in the record alone: some may wait for a step that `drain` has yet to bring here.
  each_joined(keys.record, tell)
  leave_line(BASE .. 'line:' .. model, got[5], got[3], number(got[6]), number(got[4]))
  redis.call('XDEL', BASE .. 'starts:' .. model, got[1], got[2] or got[1])
  return count, got[3]
end

-- Ends a sequence that waits for a slot, and has no state. No record stays. Arguments as above; returns the number of
-- steps.
local function refuse_waiting(keys, sid, reply, reason)
  local count, version = refuse_steps(keys, sid, reply, reason)
  count_over(sid, reason == 'REJECTED' and 'r' or 'c', version)
  leave_tenant(keys.record, sid)
  redis.call('ZREM', BASE .. 'deadlines:' .. model_of(sid), sid)
  redis.call('UNLINK', keys.record, keys.parked, keys.idle, keys.checkpoint, journal_of(sid))
  return count
end

-- To be called once, at the end of the script. A tally that was empty is new, and gets its TTL here.
local function tally_all()
  for _, key in ipairs(tally_keys) do
    local length = 0
    if successes[key] then table.insert(tallies[key], packed_sums(successes[key])) end
    for counts, from, to in pieces(tallies[key]) do length = redis.call('RPUSH', key, unpack(counts, from, to)) end
    if length == #tallies[key] then redis.call('PEXPIRE', key, TALLY_TTL_MS) end
  end
end

-- each call
tallies, tally_keys, successes = {}, {}, {}
