-- Takes requests from what a tenant may send now. The allowance is the time at which the tenant has all of it again: each
-- request moves this time ahead by what lies between two requests of its rate, at most up to a whole burst from now.
--
-- KEYS   1 allowance of the tenant
-- ARGV   1 how many requests are wanted   2 us between two requests   3 most requests at one moment
-- reply  how many may be sent, us until one more may be
-- Not safe to repeat: what was taken is gone. A gateway that gets no reply lets in all that it asked for, so a tenant may
-- exceed its rate while Redis is away. What a gateway takes ahead and does not use within a second is lost to the tenant,
-- also if the limits change meanwhile.

local wanted, each, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stored, most = number(redis.call('GET', KEYS[1])), now + burst * each
-- After a change of the limits, or of the clock, the time that is stored may be further ahead than a burst allows. Then
-- it is written also if nothing may be sent now: it would be as far ahead at the next call.
local full = math.min(math.max(stored, now), most)
local granted = math.min(wanted, math.floor((most - full) / each))
full = full + granted * each
if granted > 0 or stored > most then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', string.format('%.0f', math.ceil((full - now) / 1000)))
end
return { granted, math.max(0, full + each - most) }
