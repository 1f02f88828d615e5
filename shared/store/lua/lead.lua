-- Takes or keeps the lead of models.
--
-- KEYS   1 counters of terms
--        per model: lease of its leader, and its lent slots
-- ARGV   1 scheduler   2 lease ms
--        per model: its name, the term that is to be kept, 0 to take the lead if it is free, and the newest term that
--        is known to have been given
-- reply  per model: the term; 0: another scheduler leads; or the error of Redis for this model
-- atomic a term is given together with its lease, and noted beside the lent slots if the last one is noted there: who
--        took a term and died before it led has lent nothing. Terms only grow, whatever becomes of the leases and, once a
--        fence is known, of the counters.

local function lead(lease, lent, model, term, newest)
  local holder = redis.call('GET', lease)
  if term ~= '0' then
    if holder ~= ARGV[1] .. ' ' .. term then return 0 end
    redis.call('PEXPIRE', lease, ARGV[2])
    return tonumber(term)
  end
  -- A lease of this scheduler counts as free: the reply with its term was lost, so nobody acts by that term. A lease
  -- that cannot be read or has no end counts as free too.
  local other = string.match(holder or '', '^(.*) %d+$')
  if other and other ~= ARGV[1] and redis.call('PTTL', lease) > 0 then return 0 end
  -- One that Lua cannot count with would be the same at the next leader.
  term = math.max(number(redis.call('HINCRBY', KEYS[1], model, 1)), newest + 1)
  redis.call('HSET', KEYS[1], model, term)
  if redis.call('HGET', lent, 't') == string.format('%.0f', term - 1) then redis.call('HSET', lent, 't', term) end
  redis.call('SET', lease, ARGV[1] .. ' ' .. string.format('%.0f', term), 'PX', ARGV[2])
  return term
end

local results = {}
for i = 1, (#KEYS - 1) / 2 do
  results[i] = lead(KEYS[2 * i], KEYS[2 * i + 1], ARGV[3 * i], ARGV[3 * i + 1], number(ARGV[3 * i + 2]))
end
return results
