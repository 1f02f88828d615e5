-- Notes that the owner of a suspected sequence is about to run its next step. An owner runs only one suspected sequence
-- at a time: if this owner is lost as well, the loss counts for this sequence alone (`reclaim`).
--
-- KEYS   1 record
-- ARGV   1 epoch
-- reply  1 written, 0 another executor owns the sequence now
-- Safe to repeat.

if redis.call('HGET', KEYS[1], 'ep') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'tr', ARGV[1])
return 1
