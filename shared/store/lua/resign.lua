-- Gives the lead of a model back, so that a standby scheduler need not wait for the end of the lease.
--
-- KEYS   1 lease of the model's leader
-- ARGV   1 scheduler   2 term; 0: any term of this scheduler (it asked for the lead and lost the reply)
-- reply  1 given back, 0 another scheduler has the lead

local holder, term = string.match(redis.call('GET', KEYS[1]) or '', '^(.*) (%d+)$')
if holder ~= ARGV[1] or (ARGV[2] ~= '0' and term ~= ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[1])
