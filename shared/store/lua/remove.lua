-- Removes entries of a model's stream on which its leader has acted. An older leader is refused: it would remove
-- entries that the newer leader has not read yet.
--
-- KEYS   those of leader.lua   7 the stream (feed or starts)
-- ARGV   1 term   then the entry ids
-- reply  how many entries were there
-- Safe to repeat.

local removed = 0
for entries, from, to in pieces(ARGV) do
  -- The pieces are those of ARGV, whose first value is the term.
  removed = removed + redis.call('XDEL', KEYS[MODEL_KEYS + 1], unpack(entries, math.max(from, 2), to))
end
return removed
