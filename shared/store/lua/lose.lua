-- Ends a sequence as lost, because its owner cannot read what its record says.
--
-- KEYS   1 record
-- ARGV   1 executor   2 epoch
-- reply  1 ended, its callers were told; 0 another executor owns it, or it is over
-- Safe to repeat. Its other keys follow from the record's; they carry the same hash tag.

local got = redis.call('HMGET', KEYS[1], 'st', 'ow', 'ep')
if got[1] ~= 'l' or got[2] ~= ARGV[1] or got[3] ~= ARGV[2] then return 0 end
calling_executor = ARGV[1]
lose(KEYS[1], 'its owner cannot read it')
return 1
