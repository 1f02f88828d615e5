-- Adds tallies up into the hashes of counts, and reads the hashes.
--
-- KEYS   per load of a model version: its tally (list, see tally.lua), the tally of the requests that were refused
--        without a load, its counts (hash)
-- ARGV   1 how many packed counts to add up at most, over all   2 TTL of the counts, ms   3 1 to read them
--        4 1 to renew the TTL also where nothing is added
-- reply  how many packed counts were added up, then (if they are read) per load: its counts' fields and values
-- atomic counts leave the tally when they are in the sum, so that nothing is added twice, however often this is called.
-- If fewer were added up than asked for, every tally is empty now.

local LAST = 'last_inference_ms'

local function add_up(tally, counts, room)
  local packed = redis.call('LRANGE', tally, 0, room - 1)
  if #packed == 0 then return 0 end
  local sums, last = {}, 0
  for _, one in ipairs(packed) do
    local read, fields = pcall(cmsgpack.unpack, one)
    if not read or type(fields) ~= 'table' or #fields % 2 == 1 then
      count_unreadable(tally, 'no counts')
      fields = {}
    end
    for i = 1, #fields, 2 do
      local field, by = fields[i], tonumber(fields[i + 1])
      if type(field) ~= 'string' or not by or number(by) ~= by then
        count_unreadable(tally, 'no count')
      elseif field == LAST then
        last = math.max(last, by)
      else
        sums[field] = (sums[field] or 0) + by
      end
    end
  end
  for field, by in pairs(sums) do
    redis.call('HINCRBY', counts, field, string.format('%.0f', number(by)))
  end
  if last > number(redis.call('HGET', counts, LAST)) then
    redis.call('HSET', counts, LAST, string.format('%.0f', last))
  end
  -- Last, so that no count is lost if Redis has no memory for the sums and ends the script at the first of them.
  redis.call('LTRIM', tally, #packed, -1)
  return #packed
end

local tallies = {}
for i = 1, #KEYS, 3 do
  tallies[#tallies + 1] = KEYS[i]
  tallies[#tallies + 1] = KEYS[i + 1]
end
-- One command for all: of many models few are used in a second.
local has_counts = redis.call('EXISTS', unpack(tallies)) > 0

local room, results = tonumber(ARGV[1]), { 0 }
for i = 1, #KEYS, 3 do
  local before = results[1]
  for tally = i, has_counts and i + 1 or 0 do
    if room > results[1] then
      results[1] = results[1] + add_up(KEYS[tally], KEYS[i + 2], room - results[1])
    end
  end
  if ARGV[4] == '1' or results[1] > before then redis.call('PEXPIRE', KEYS[i + 2], ARGV[2]) end
  if ARGV[3] == '1' then results[#results + 1] = redis.call('HGETALL', KEYS[i + 2]) end
end
return results
