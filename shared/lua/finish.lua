-- Answers stateless requests that this consumer holds; a request that was claimed by another in between is left to it.
--
-- KEYS   1 tally of the model version   per request: its work stream
-- ARGV   1 group   2 prefix of this shard's reply streams   3 consumer
--        4 number of executions' packed counts, these counts (counted when this call answers anything at all)
--        per request: entry id, gateway, token, reply, packed counts
-- reply  per request: 1 answered, 0 somebody else has it or had it
-- Reply streams carry the hash tag of the declared keys.

local outgoing, gateways, results = {}, {}, {}
local executions, answered_any = tonumber(ARGV[4]), false
for i = 1, #KEYS - 1 do
  local a = 4 + executions + (i - 1) * 5
  local stream = KEYS[i + 1]
  local pending = redis.call('XPENDING', stream, ARGV[1], ARGV[a + 1], ARGV[a + 1], 1, ARGV[3])
  if #pending == 1 then
    redis.call('XACK', stream, ARGV[1], ARGV[a + 1])
    redis.call('XDEL', stream, ARGV[a + 1])
    tally(KEYS[1], ARGV[a + 5])
    answered_any = true
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
if answered_any then
  for i = 1, executions do tally(KEYS[1], ARGV[4 + i]) end
end
tally_all()
for _, gateway in ipairs(gateways) do
  redis.call('XADD', ARGV[2] .. gateway, 'NOMKSTREAM', '*', unpack(outgoing[gateway]))
end
return results
