-- Gives the lead of a model back, so that a standby need not wait for the lease's end.
--
-- KEYS   1 lease of the model's leader
-- ARGV   1 scheduler   2 term
-- reply  1 given back, 0 it was another's

if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ' ' .. ARGV[2] then return 0 end
return redis.call('DEL', KEYS[1])
