-- Gives the lead of a model back, so that a standby need not wait for the lease's end.
--
-- KEYS   1 lease of the model's leader
-- ARGV   1 scheduler   2 term, 0: whichever it was given (it asked for the lead and did not hear of it)
-- reply  1 given back, 0 it was another's

local holder, term = string.match(redis.call('GET', KEYS[1]) or '', '^(.*) (%d+)$')
if holder ~= ARGV[1] or (ARGV[2] ~= '0' and term ~= ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[1])
