-- Answers stateless requests that this consumer holds; a request that was claimed by another in between is left to it.
--
-- KEYS   per request: its work stream
-- ARGV   1 group   2 prefix of this shard's reply streams   3 consumer
--        per request: entry id, gateway, token, reply
-- reply  per request: 1 answered, 0 somebody else has it or had it
-- Reply streams carry the hash tag of the declared keys.

local outgoing, gateways, results = {}, {}, {}
for i = 1, #KEYS do
  local a = 3 + (i - 1) * 4
  local pending = redis.call('XPENDING', KEYS[i], ARGV[1], ARGV[a + 1], ARGV[a + 1], 1, ARGV[3])
  if #pending == 1 then
    redis.call('XACK', KEYS[i], ARGV[1], ARGV[a + 1])
    redis.call('XDEL', KEYS[i], ARGV[a + 1])
    local gateway = ARGV[a + 2]
    if not outgoing[gateway] then
      outgoing[gateway] = {}
      gateways[#gateways + 1] = gateway
    end
    local fields = outgoing[gateway]
    fields[#fields + 1] = ARGV[a + 3]
    fields[#fields + 1] = ARGV[a + 4]
    results[i] = 1
  else
    results[i] = 0
  end
end
for _, gateway in ipairs(gateways) do
  redis.call('XADD', ARGV[2] .. gateway, 'NOMKSTREAM', '*', unpack(outgoing[gateway]))
end
return results
