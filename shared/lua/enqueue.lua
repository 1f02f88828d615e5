-- Accepts stateless requests, in the order given.
--
-- KEYS   per request: the work stream of its model, version and priority
-- ARGV   1 bound of a work stream (0: none)   per request: gateway, token, message, bound of its own queue (0: none)
-- reply  per request: 1 accepted, 0 its queue is full

local results = {}
for i = 1, #KEYS do
  local a = 1 + (i - 1) * 4
  local length = redis.call('XLEN', KEYS[i])
  local bound, own = tonumber(ARGV[1]), tonumber(ARGV[a + 4])
  if (bound > 0 and length >= bound) or (own > 0 and length >= own) then
    results[i] = 0
  else
    redis.call('XADD', KEYS[i], '*', 'g', ARGV[a + 1], 't', ARGV[a + 2], 'm', ARGV[a + 3])
    results[i] = 1
  end
end
return results
