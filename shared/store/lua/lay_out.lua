-- Lays out free slots of an executor: `submit` gives them to new sequences (`spares_of` in common.lua).
--
-- KEYS   those of leader.lua   7 spare slots of (executor, model)
-- ARGV   1 term   2 version   3 the slots, as they are stored
-- reply  1
-- A slot must not be laid out twice: nothing sends this call again.

local SPARES, FIELD = KEYS[MODEL_KEYS + 1], 'v:' .. ARGV[2]
-- What an earlier leader has laid out is free again: nobody could take it since the fence was raised.
if redis.call('HGET', SPARES, 't') ~= ARGV[1] then redis.call('DEL', SPARES) end
redis.call('HSET', SPARES, 't', ARGV[1], FIELD, (redis.call('HGET', SPARES, FIELD) or '') .. ARGV[3])
return 1
