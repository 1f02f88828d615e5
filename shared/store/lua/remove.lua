-- Removes entries of a model's stream on which its leader has acted. An older leader may not: it would take from the
-- newer one what that has not read yet.
--
-- KEYS   1 fence of the model   2 the stream (feed or starts)
-- ARGV   1 term   then the entry ids
-- reply  how many were there
-- Safe to repeat.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local removed = 0
for entries, from, to in pieces(ARGV) do
  removed = removed + redis.call('XDEL', KEYS[2], unpack(entries, math.max(from, 2), to))
end
return removed
