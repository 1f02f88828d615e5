-- Prelude of every script: what more than one of them needs. Prepended by shared/store/scripts.py.
--
-- What each field of a sequence's record means, who writes it and when it is absent: shared/contract/record.py. Its
-- states: w waiting, l live, m moving, p paged; tombstones: e ended, x expired, f failed at START, o lost, c cancelled.
-- A START on a live sequence goes on counting; one after the end begins a new record, with nothing of the old one.

-- What cannot be read concerns its own sequence or request only (shared/store/reading.py): no script fails of it.

local START, END, IMPLICIT, DURABLE, ALONE, PAGEABLE = 1, 2, 4, 8, 16, 32

local server = redis
local redis = setmetatable({}, { __index = server })
-- Told of every key that was removed because it cannot be read; set by a script that can make it again.
local on_removed = nil

local function base_of(key)
  return string.match(key, '^(.-}:)')
end

-- Counts what cannot be read, by the kind of its key (shared/store/keyspace.py).
local function count_unreadable(key, cause)
  local base = base_of(key)
  if not base then return end
  local kind = string.match(key, '}:([^:]+)')
  if kind == 'work' or kind == 'cache' then kind = kind .. ':' .. string.match(key, '([^:]*)$') end
  if type(server.pcall('HINCRBY', base .. 'unreadable', kind, 1)) == 'table' then return end
  server.pcall('HSET', base .. 'unreadable', 'last:' .. kind, key)
  server.log(server.LOG_WARNING, 'seqmesh: value unreadable: ' .. key .. ': ' .. cause)
end

-- Removes what a command stumbled over: a key of another type, or a number that is none. A counter goes on above all
-- that it can have given: from the clock.
local function remove_unreadable(err, command, key, field)
  local is_number = string.find(err, 'not an integer', 1, true) or string.find(err, 'would overflow', 1, true)
  if is_number and command == 'HINCRBY' then
    server.call('HDEL', key, field)
  elseif string.find(err, 'WRONGTYPE', 1, true) or string.find(err, 'exhausted the last possible ID', 1, true)
    or is_number and (command == 'INCR' or command == 'INCRBY') then
    server.call('UNLINK', key)
    if string.find(key, ':epoch$') or string.find(key, ':number$') then
      server.call('SET', key, server.call('TIME')[1] .. '000')
    end
    if on_removed then on_removed(key) end
  else
    return
  end
  count_unreadable(key, err)
end

-- Every command of a script: one that stumbles over what cannot be read is carried out as if that were not there.
function redis.call(command, ...)
  local reply = server.pcall(command, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  remove_unreadable(reply.err, command, ...)
  return server.call(command, ...)
end

local function has(flags, bit_value)
  return bit.band(flags, bit_value) ~= 0
end

-- A whole number, as far as Lua can count; 0 for everything else.
local function number(value)
  local n = tonumber(value or '0') or 0
  return n % 1 == 0 and n > -9007199254740992 and n < 9007199254740992 and n or 0
end

-- Whether a list of numbers, separated by spaces, holds this one.
local function listed(list, n)
  return list and string.find(' ' .. list .. ' ', ' ' .. n .. ' ', 1, true) ~= nil
end

-- After so many owners in a row a sequence is suspected: its owner goes on with it apart from others like it, and only
-- what was tried that way counts further. So those that just lay beside what kills executors are not given up with it.
local SUSPECTED_FROM = 2

-- Owners that were lost with this next step (lost: field tk), if they are enough for a suspicion.
local function suspicion(lost, step)
  local n, count = string.match(lost or '', '(%d+) (%d+)')
  if tonumber(n) == step and tonumber(count) >= SUSPECTED_FROM then return count end
end

local now_ms = nil

-- Redis stops the clock while a script runs, so one look is enough for all of its steps.
local function clock_ms()
  if not now_ms then
    local now = redis.call('TIME')
    now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  end
  return now_ms
end

-- Lua hands no more than 8000 values on at once.
local PIECE = 1000

-- Pieces of a list, for `unpack`; pairs stay together.
local function pieces(list)
  local from = 1 - PIECE
  return function()
    from = from + PIECE
    if from <= #list then return list, from, math.min(from + PIECE - 1, #list) end
  end
end

-- Bytes of answers after which an entry takes no more: Redis takes none of a GiB, and whoever reads one holds all of it.
local ENTRY_BYTES = 4194304

-- Answers to callers gather while a script runs; those for one gateway leave together, if it still listens.
local outgoing, gateways = {}, {}

local function answer(gateway, token, reply)
  if not (gateway and token) then return end
  local fields = outgoing[gateway]
  if not fields then
    fields = {}
    outgoing[gateway] = fields
    gateways[#gateways + 1] = gateway
  end
  fields[#fields + 1] = token
  fields[#fields + 1] = reply
end

-- The last field of the entry that begins with this one: few enough for `unpack`, and not too many bytes.
local function entry_end(fields, from)
  local to, bytes = from + 1, #fields[from + 1]
  while to < #fields and to - from + 2 < PIECE and bytes + #fields[to + 2] <= ENTRY_BYTES do
    to = to + 2
    bytes = bytes + #fields[to]
  end
  return to
end

-- To be called once, at the end of a script that answers. prefix: of this shard's reply streams.
local function send_answers(prefix)
  for _, gateway in ipairs(gateways) do
    local fields, from = outgoing[gateway], 1
    while from < #fields do
      local to = entry_end(fields, from)
      redis.call('XADD', prefix .. gateway, 'NOMKSTREAM', '*', unpack(fields, from, to))
      from = to + 1
    end
  end
end

-- What the callers of a sequence hear, and of a request, that cannot be read. As shared/contract/messages.py packs a ReplyMessage.
local LOST_REPLY = cmsgpack.pack({ '', {}, 'INVALID_ARG', 'what the mesh held of the sequence cannot be read: the next ' ..
  'request must specify the START flag', 'lost' })
local UNREADABLE_REPLY = cmsgpack.pack({ '', {}, 'INTERNAL', 'the request cannot be read where the mesh stored it: it ' ..
  'was not run' })
local UNREADABLE_TOMBSTONE_MS = 600000
local STATES = { w = true, l = true, m = true, p = true, e = true, x = true, f = true, o = true, c = true }

-- Whether a record's numbers can be: what is none is nil, or compares with nothing.
local function is_sound(state, accepted, committed, start, version)
  return STATES[state] and version and accepted and committed and start and committed >= 0 and accepted >= committed
    and start >= 0 and accepted < 9007199254740992 and accepted % 1 == 0 and committed % 1 == 0 and start % 1 == 0
end

-- Tells everybody who is known to wait for a step of a sequence that it is lost, at once. Returns whom, by `<gateway>
-- <token>`.
local function tell_lost(base, record, parked)
  local told = {}
  local function tell(gateway, token)
    if gateway and token and not told[gateway .. ' ' .. token] then
      told[gateway .. ' ' .. token] = true
      redis.call('XADD', base .. 'replies:' .. gateway, 'NOMKSTREAM', '*', token, LOST_REPLY)
    end
  end
  local got = redis.call('HGETALL', record)
  for i = 1, #got, 2 do
    if string.sub(got[i], 1, 2) == 'j:' then
      for gateway, token in string.gmatch(got[i + 1], '(%S+) (%S+);') do tell(gateway, token) end
    elseif got[i] == 'la' then
      tell(string.match(got[i + 1], '^%S+ (%S+) (%S+)'))
      tell(string.match(got[i + 1], '^%S+ %S+ %S+ (%S+) (%S+)'))
    end
  end
  for _, entry in ipairs(redis.call('XRANGE', parked, '-', '+')) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    tell(fields.g, fields.t)
  end
  return told
end

-- The end of a sequence of which something cannot be read: whoever waits for it hears that it is lost, its slot goes
-- back, a tombstone stays. All of its keys follow from the record's. Its epoch may be what cannot be read: every one
-- that there has been so far is over. Returns as `tell_lost`.
local function lose(record, cause)
  count_unreadable(record, cause)
  local base, sid = string.match(record, '^(.-}:)seq:(.*)$')
  local model, parked = string.match(sid, '^[^|]*'), base .. 'parked:' .. sid
  local got = redis.call('HMGET', record, 'ow', 'be', 'bn', 'vr', 'nx', 'cm', 'st')
  local told = tell_lost(base, record, parked)
  if got[2] and got[2] == got[3] then
    redis.call('HINCRBY', base .. 'line:' .. model, 'w', -1)
    local waiting = (tonumber(got[5]) or 0) - (tonumber(got[6]) or 0)
    if got[4] and waiting > 0 and waiting % 1 == 0 and waiting < 1000000 then
      redis.call('HINCRBY', base .. 'line:' .. model, 's:' .. got[4], -waiting)
    end
  end
  redis.call('DEL', record, base .. 'idle:' .. sid, parked, base .. 'checkpoint:' .. sid)
  redis.call('ZREM', base .. 'deadlines:' .. model, sid)
  if got[1] then redis.call('SREM', base .. 'owned:' .. got[1] .. ':' .. model, sid) end
  redis.call('HSET', record, 'st', 'o', 'cl', 1, 'nx', 0, 'cm', 0, 'sn', 1, 'vr', '')
  redis.call('PEXPIRE', record, UNREADABLE_TOMBSTONE_MS)
  redis.call('XADD', base .. 'feed:' .. model, '*', 'q', sid, 'e', number(redis.call('GET', base .. 'epoch')), 'k', 'u')
  return told
end

-- Does something for one sequence, or else loses it, if it is what is stored that lets this fail. Returns whether it was
-- done, and the result, or who was told.
local function for_one(record, act, ...)
  local done, result = pcall(act, ...)
  if done then return true, result end
  local cause = type(result) == 'table' and result.err or result
  -- A mistake in a record shows as one of Lua, or of an argument; everything else is not for a script to judge.
  if type(cause) ~= 'string' or type(result) == 'table' and string.sub(cause, 1, 4) ~= 'ERR ' then error(result) end
  return false, lose(record, cause)
end

-- Leadership: a scheduler whose term is older than the newest seen in this shard may not decide any more.
local function fence(key, term)
  local seen = number(redis.call('GET', key))
  if seen > term then
    return redis.error_reply('FENCED term ' .. term .. ' is older than ' .. seen)
  end
  if seen < term then
    redis.call('SET', key, term)
  end
  return nil
end

-- What the waiting line of a model amounts to (hash; see shared/store/waiting_line.py): w sequences that wait for their first
-- slot; by version, s:<v> steps that wait with their sequences, out:<v> times that a sequence gave up its slot, in:<v>
-- that it wanted one again, gone:<v> that it ended without one; lost:<v>, leaving:<v>, moved:<v> that one was taken over
-- from an owner that had died, that left, that lives on; refused:<v> steps of owners that were no owners any more.
local function count_line(line, field, change)
  if change ~= 0 then redis.call('HINCRBY', line, field, change) end
end

-- A sequence with nothing in flight gives up its slot. Its owner is remembered: it may send the last commit once more.
-- Its idle time goes on.
local function page(record, line, version)
  redis.call('HSET', record, 'st', 'p')
  redis.call('HDEL', record, 'in', 'sl')
  count_line(line, 'out:' .. version, 1)
end

-- A sequence leaves the line, with its steps. state: w or m
local function leave_line(line, state, version, accepted, committed)
  if state == 'w' then count_line(line, 'w', -1) end
  count_line(line, 's:' .. version, committed - accepted)
end

-- A sequence is between two owners: before the waiting ones by its kind, it gets the next by `assign`.
local function move_on(record, starts, epochs, sid, version)
  local entry = redis.call('XADD', starts, '*', 'q', sid, 'v', version, 'u', '0', 'k', 'm')
  redis.call('HSET', record, 'st', 'm', 'be', entry, 'ep', redis.call('INCR', epochs))
  redis.call('HDEL', record, 'ow', 'in', 'sl')
end

-- The state is gone since this step: those behind it hear of it by the ordinary way of a reply, until a START. start:
-- the latest accepted one; if none is behind the step, nothing else is accepted.
local function lose_state(record, since, kind, start)
  redis.call('HSET', record, 'vd', since, 'vk', kind)
  if start <= since then redis.call('HSET', record, 'cl', 1) end
end

-- The end of a sequence's record, whatever the cause: its slot goes to the scheduler's feed, a tombstone stays.
-- keys: record, idle, parked, checkpoint, deadlines; of one that holds a slot also owned, feed
local function release(keys, sid, kind, epoch, tombstone_ms)
  redis.call('DEL', keys.idle, keys.parked, keys.checkpoint)
  redis.call('ZREM', keys.deadlines, sid)
  if keys.owned then
    redis.call('SREM', keys.owned, sid)
    redis.call('XADD', keys.feed, '*', 'q', sid, 'e', epoch, 'k', kind)
  end
  redis.call('HDEL', keys.record, 'ow', 'in', 'sl', 'vd', 'vk', 'be', 'du', 'pg', 'ca', 'tk', 'tr', 'gu', 'fl', 'og', 'mk')
  redis.call('HSET', keys.record, 'st', kind, 'cl', '1')
  redis.call('PEXPIRE', keys.record, tombstone_ms)
end

-- The end of a sequence that waits for a slot: each of its steps gets the same reply, and nothing of it stays. Steps
-- that were answered before and are kept for their state get none.
-- keys: record, idle, parked, checkpoint, starts, line. refused(version, ms): told of each step, with the time it waited.
-- Returns the number of steps.
local function refuse_waiting(keys, replies_prefix, reply, refused)
  local got = redis.call('HMGET', keys.record, 'be', 'dn', 'vr', 'cm', 'st', 'nx')
  local count = 0
  local function refuse(fields, since_ms)
    count = count + 1
    redis.call('XADD', replies_prefix .. fields.g, 'NOMKSTREAM', '*', fields.t, reply)
    refused(got[3], clock_ms() - since_ms)
    for gateway, token in string.gmatch(redis.call('HGET', keys.record, 'j:' .. fields.n) or '', '(%S+) (%S+);') do
      redis.call('XADD', replies_prefix .. gateway, 'NOMKSTREAM', '*', token, reply)
    end
  end
  for _, entry in ipairs(redis.call('XRANGE', keys.parked, '-', '+')) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    if fields.g and fields.t and number(fields.n) > number(got[4]) then refuse(fields, tonumber(string.match(entry[1], '^%d+'))) end
  end
  leave_line(keys.line, got[5], got[3], number(got[6]), number(got[4]))
  redis.call('XDEL', keys.starts, got[1], got[2] or got[1])
  redis.call('DEL', keys.record, keys.parked, keys.idle, keys.checkpoint)
  return count
end
