-- Writes down that the owner of a sequence is about to go on with it: of several that owners were lost with, only one at
-- a time. Should this owner be lost as well, it is this one that counts (`reclaim`).
--
-- KEYS   1 record
-- ARGV   1 epoch
-- reply  1 written, 0 the sequence is another's now
-- Safe to repeat.

if redis.call('HGET', KEYS[1], 'ep') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'tr', ARGV[1])
return 1
