-- Removes entries of a model's stream on which its leader has acted. An older leader is refused: it would remove
-- entries that the newer leader has not read yet.
--
-- KEYS   1 fence of the model   2 the stream (feed or starts)
-- ARGV   1 term   then the entry ids
-- reply  how many entries were there
-- Safe to repeat.

local fenced = fence(KEYS[1], tonumber(ARGV[1]))
if fenced then return fenced end

local removed = 0
for entries, from, to in pieces(ARGV) do
  -- The pieces are those of ARGV, whose first value is the term.
  removed = removed + redis.call('XDEL', KEYS[2], unpack(entries, math.max(from, 2), to))
end
return removed
