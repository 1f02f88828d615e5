-- Makes an open sequence from an exported one, under an id that has none. It is paged until its next step; a sequence
-- that is to keep its slot waits for one at once.
--
-- KEYS   record
-- ARGV   1 version   2 idle ms   3 most live sequences of the model   4 1 if it may be paged, else 0
--        5 last step   6 step with the latest START   7 what only this call is named
--        8 number of other fields and values of the record, these fields and values
--        number of fields and values of the journal but `run`, these fields and values
--        then the fields and values of the checkpoint
-- reply  1 done   0 the id has an open sequence   -1 the model has as many live sequences as it may
-- atomic everything. Safe to repeat until the sequence has a further step.

local version, idle_ms, may_page, last, fields = ARGV[1], tonumber(ARGV[2]), ARGV[4] == '1', ARGV[5], tonumber(ARGV[8])
local keys, sid = sequence_keys(KEYS[1]), id_of(KEYS[1])
local model = model_of(sid)
local deadlines = BASE .. 'deadlines:' .. model

local state, latest = unpack(redis.call('HMGET', keys.record, 'st', 'la'))
if state and not TOMBSTONES[state] then return string.match(latest or '', '%S+$') == ARGV[7] and 1 or 0 end
if redis.call('ZCARD', deadlines) >= tonumber(ARGV[3]) then return -1 end
-- Steps of a sequence whose record was removed: they must not become this one's.
if not state and redis.call('EXISTS', keys.parked) == 1 then lose(KEYS[1], NOT_SOUND) end

redis.call('DEL', keys.record, keys.checkpoint, journal_of(sid))
-- In pieces: of a decoupled model it may hold thousands of answers.
for values, from, to in pieces(ARGV, 9, 8 + fields) do redis.call('HSET', keys.record, unpack(values, from, to)) end
local tenant = tenant_of(keys.record)
if tenant ~= '' then redis.call('SADD', sequences_of(tenant), sid) end
local entry = line_up(sid, 'm', version, '0', tenant)
redis.call('HSET', keys.record, 'nx', last, 'cm', last, 'ck', last, 'sn', ARGV[6], 'cl', 0, 'vr', version, 'du', 1, 'bn',
  entry, 'la', clock_ms() .. ' - ' .. ARGV[7])
if may_page then
  redis.call('XDEL', BASE .. 'starts:' .. model, entry)
  redis.call('HSET', keys.record, 'st', 'p', 'pg', 1)
  count_line(BASE .. 'line:' .. model, 'out:' .. version, 1)
else
  redis.call('HSET', keys.record, 'st', 'm', 'be', entry, 'ep', redis.call('INCR', BASE .. 'epoch'))
end
local journal, journal_end = 10 + fields, 9 + fields + tonumber(ARGV[9 + fields])
for values, from, to in pieces(ARGV, journal, journal_end) do
  redis.call('HSET', journal_of(sid), 'run', entry .. '.' .. ARGV[6], unpack(values, from, to))
end
for values, from, to in pieces(ARGV, journal_end + 1) do
  redis.call('HSET', keys.checkpoint, 'n', last, unpack(values, from, to))
end
count_line(BASE .. 'line:' .. model, 'begun:' .. version, 1)
redis.call('SET', keys.idle, '1', 'PX', idle_ms)
redis.call('ZADD', deadlines, clock_ms() + idle_ms, sid)
return 1
