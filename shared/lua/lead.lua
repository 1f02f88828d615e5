-- Takes or keeps the lead of a model.
--
-- KEYS   1 lease of the model's leader   2 counters of terms
-- ARGV   1 model   2 scheduler   3 lease ms   4 the term that is to be kept, 0 to take the lead if it is free
-- reply  the term, or 0: another scheduler leads
-- atomic a term is given with the lease it belongs to. Terms only grow, whatever becomes of the leases.

local term = tonumber(ARGV[4])
if term > 0 then
  if redis.call('GET', KEYS[1]) ~= ARGV[2] .. ' ' .. term then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return term
end
-- A lease of its own that it has not heard of is as good as free: nobody acts by that term.
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.*) %d+$') ~= ARGV[2] then return 0 end
term = redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
redis.call('SET', KEYS[1], ARGV[2] .. ' ' .. term, 'PX', ARGV[3])
return term
