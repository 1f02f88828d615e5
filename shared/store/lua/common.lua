-- Prelude of every script: what more than one of them needs. shared/store/libraries.py makes one function library of all
-- scripts and preludes. What stands above a file's line `-- each call` is defined once, when Redis loads the library: no
-- call pays the dozen us that the sixty functions of `submit` take. So nothing above that line may keep anything of a
-- call, unless what stands below makes it new.
--
-- What each field of a sequence's record means, which script writes it and when it is absent: docs/reference/keys.md.
-- States: w waiting for its first slot, l live, m moving to another owner, p paged; tombstones: e ended, x expired, f
-- failed at START, o lost, c cancelled.
-- A START on a live sequence goes on counting steps. A START after the end begins a new record, and nothing of the old
-- record stays.

-- A value that cannot be read costs its own sequence or request only (shared/store/reading.py): no script fails because
-- of it.

local START, END, IMPLICIT, DURABLE, ALONE, PAGEABLE, STREAMED, TOLD = 1, 2, 4, 8, 16, 32, 64, 128
-- Flag of a step that has the arguments that most steps leave out; only `submit` and `commit` are told it.
local MORE = 256

-- Of the present call: its keys and arguments; what Redis offers (a library sees it in calls only); the beginning of
-- every key of its shard. Keys that a script builds from a record begin with BASE too, so they carry the hash tag of the
-- declared keys.
local KEYS, ARGV, server, BASE

-- Whether this server is a node of a Cluster; nil before the first call.
local is_node = nil

local function offered() return redis end
local redis = {}

function redis.error_reply(text) return { err = text } end

-- The executor that calls, if it is an owner's call: the owner of a sequence whose record names none.
local calling_executor = nil

-- Called with every key that was removed because it cannot be read. A script that can rebuild such a key sets it.
local on_removed = nil

-- A script is told of a sequence by the key of its record. Its id, and its other keys, follow from that.
local function id_of(record) return string.sub(record, #BASE + 5) end
local function idle_of(sid) return BASE .. 'idle:' .. sid end
local function parked_of(sid) return BASE .. 'parked:' .. sid end
local function checkpoint_of(sid) return BASE .. 'checkpoint:' .. sid end

-- The keys of a sequence.
local function sequence_keys(record)
  local sid = id_of(record)
  return { record = record, idle = idle_of(sid), parked = parked_of(sid), checkpoint = checkpoint_of(sid) }
end

-- Counts an unreadable value by the kind of its key (docs/reference/keys.md), and logs it.
local function count_unreadable(key, cause)
  local kind = string.match(key, '}:([^:]+)')
  if kind == 'work' or kind == 'cache' then kind = kind .. ':' .. string.match(key, '([^:]*)$') end
  -- `server.pcall`, not `redis.call`: the counter itself may be unreadable, and counting that would never end.
  if type(server.pcall('HINCRBY', BASE .. 'unreadable', kind, 1)) == 'table' then return end
  server.pcall('HSET', BASE .. 'unreadable', 'last:' .. kind, key)
  server.log(server.LOG_WARNING, 'seqmesh: value unreadable: ' .. key .. ': ' .. cause)
end

-- From here on Lua writes a number with an exponent, which nobody reads in an entry.
local COUNTED_MAX = 100000000000000
local PAST_COUNTING = { err = 'not an integer from 1 to 10^14' }

-- Removes the value that a command failed at: a key of another type, or a counter that is no number, or too large a one.
local function remove_unreadable(err, command, key, field)
  local is_number = string.find(err, 'not an integer', 1, true) or string.find(err, 'would overflow', 1, true)
  if is_number and command == 'HINCRBY' then
    server.call('HDEL', key, field)
  elseif string.find(err, 'WRONGTYPE', 1, true) or string.find(err, 'exhausted the last possible ID', 1, true)
    or is_number and (command == 'INCR' or command == 'INCRBY') then
    server.call('UNLINK', key)
    -- These counters only grow. The clock in ms is above every value that they can have given: they count slower.
    if key == BASE .. 'epoch' or string.find(string.sub(key, #BASE + 1), '^work:.*:number$') then
      server.call('SET', key, server.call('TIME')[1] .. '000')
    end
    if on_removed then on_removed(key) end
  else
    return
  end
  count_unreadable(key, err)
end

-- Every command of a script goes through here. One that fails because of an unreadable value is run again without it.
local try
function redis.call(command, ...)
  local reply = try(command, ...)
  -- Sums of statistics (HINCRBY) may be larger: no script takes their reply.
  if (command == 'INCR' or command == 'INCRBY') and type(reply) == 'number'
    and (reply < 1 or reply >= COUNTED_MAX) then
    reply = PAST_COUNTING
  end
  if type(reply) ~= 'table' or not reply.err then return reply end
  remove_unreadable(reply.err, command, ...)
  return server.call(command, ...)
end

local function has(flags, bit_value)
  return bit.band(flags, bit_value) ~= 0
end

-- A whole number within 2^53, up to which Lua counts exactly; 0 for everything else.
local function number(value)
  local n = tonumber(value or '0') or 0
  return n % 1 == 0 and n > -9007199254740992 and n < 9007199254740992 and n or 0
end

-- Appends a pair: a field and its value, a token and its reply.
local function append(list, first, second)
  local size = #list
  list[size + 1], list[size + 2] = first, second
end

-- Whether a list of numbers, separated by spaces, holds the number n.
local function listed(list, n)
  return list and string.find(' ' .. list .. ' ', ' ' .. n .. ' ', 1, true) ~= nil
end

-- A sequence is suspected when so many owners in a row were lost with it. Its next owner runs it apart from other
-- suspected sequences, and from then on only owners lost in that way count. So a sequence that merely shared an
-- executor with the one that kills executors is not given up.
local SUSPECTED_FROM = 2

-- How many owners were lost with this next step, if that is enough for a suspicion; else nil. lost: the record's field
-- tk
local function suspicion(lost, step)
  local n, count = string.match(lost or '', '(%d+) (%d+)')
  if tonumber(n) == step and tonumber(count) >= SUSPECTED_FROM then return count end
end

local now_ms = nil

-- Redis stops its clock while a script runs, so one reading holds for the whole script.
local function clock_ms()
  if not now_ms then
    local now = redis.call('TIME')
    now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  end
  return now_ms
end

-- `unpack` of Lua 5.1 fails with more than about 8000 values.
local PIECE = 1000

-- Iterates over a list, or a part of it, in pieces that `unpack` takes. PIECE is even, so the two values of a pair stay
-- together.
local function pieces(list, first, last)
  local from = (first or 1) - PIECE
  last = last or #list
  return function()
    from = from + PIECE
    if from <= last then return list, from, math.min(from + PIECE - 1, last) end
  end
end

-- Bytes of answers after which a stream entry takes no more. Redis refuses an entry of a GiB, and the reader of an
-- entry holds all of it in memory.
local ENTRY_BYTES = 4194304

-- Answers are collected while a script runs. The answers for one gateway leave in one entry (as far as they fit), and
-- only if the gateway's reply stream exists, that is, if the gateway lives.
local outgoing, gateways

local function answer(gateway, token, reply)
  if not (gateway and token) then return end
  local fields = outgoing[gateway]
  if not fields then
    fields = {}
    outgoing[gateway] = fields
    gateways[#gateways + 1] = gateway
  end
  append(fields, token, reply)
end

-- Index of the last field of the entry that begins at `from`: few enough fields for `unpack`, and not too many bytes.
local function entry_end(fields, from)
  local to, bytes = from + 1, #fields[from + 1]
  while to < #fields and to - from + 2 < PIECE and bytes + #fields[to + 2] <= ENTRY_BYTES do
    to = to + 2
    bytes = bytes + #fields[to]
  end
  return to
end

local NOT_SOUND = 'the record of a sequence cannot be read'

-- Raises an error for a record that says of more kept answers than it has fields: whoever went through them would not
-- come to an end.
local function check_answers(record, first, last)
  if last - first >= redis.call('HLEN', record) then error(NOT_SOUND) end
end

-- The answers of a decoupled model to step n that its sequence's record holds beside the last one (field an): how many
-- were written, the first one that is kept, and their bytes.
local function answers_of(record, n)
  local step, count, first, bytes = string.match(redis.call('HGET', record, 'an') or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if tonumber(step) ~= n then return 0, 1, 0 end
  check_answers(record, tonumber(first), tonumber(count))
  return tonumber(count), tonumber(first), tonumber(bytes)
end

-- The field of a record that holds answer i to step n.
local function answer_field(n, i) return 'p:' .. n .. ':' .. i end

-- To be called once, at the end of a script that answers.
local function send_answers()
  for _, gateway in ipairs(gateways) do
    local fields, from = outgoing[gateway], 1
    while from < #fields do
      local to = entry_end(fields, from)
      redis.call('XADD', BASE .. 'replies:' .. gateway, 'NOMKSTREAM', '*', unpack(fields, from, to))
      from = to + 1
    end
  end
end

-- The replies for a sequence, and for a stateless request, that cannot be read, packed as a ReplyMessage of
-- shared/contract/messages.py is.
local function lost_reply()
  return cmsgpack.pack({ '', {}, 'INVALID_ARG', 'what the mesh held of the sequence cannot be read: the next request ' ..
    'must specify the START flag', 'lost' })
end
local function unreadable_reply()
  return cmsgpack.pack({ '', {}, 'INTERNAL', 'the request cannot be read where the mesh stored it: it was not run' })
end
local TOMBSTONES = { e = true, x = true, f = true, o = true, c = true }
local STATES = { w = true, l = true, m = true, p = true, e = true, x = true, f = true, o = true, c = true }

-- The state of the tombstone of a sequence whose state is gone. kind: the record's field vk
local function void_kind(kind) return kind and (TOMBSTONES[kind] and kind or 'o') or 'f' end

-- The state of the tombstone that `end` has chosen for the present run of a sequence; nil if that was not ended.
-- ended: the record's field en; start: the step with its latest START
local function ended_as(ended, start)
  local n, kind = string.match(ended or '', '^(%d+) (%l)$')
  return n and tonumber(n) >= start and TOMBSTONES[kind] and kind
end

-- A stream entry's fields as a table.
local function fields_of(entry)
  local fields, flat = {}, entry[2]
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- What a step's entry in an inbox, or among the parked steps, says of it (field a), as text: an entry of few fields is
-- written, read and removed in half of the time.
local function about_step(n, flags, gateway, token, sid)
  return n .. ' ' .. flags .. ' ' .. gateway .. ' ' .. token .. ' ' .. sid
end

-- Reads that text: number, flags, gateway, token, sequence id. nil for a control message, which has none.
local function step_of(about)
  if about then return string.match(about, '^(%d+) (%d+) (%S+) (%S+) (.*)$') end
end

-- Where the owner has the sequence, in the entry of a step in its inbox (field o).
local function ownership(epoch, instance, slot, committed, version)
  return epoch .. ' ' .. instance .. ' ' .. slot .. ' ' .. committed .. ' ' .. version
end

-- Puts a step that was accepted before into the inbox of its sequence's present owner.
-- n: its number, as text; fields: of its entry, in another inbox or among the parked steps
-- owned: of the record: owner, epoch, instance, slot, committed, version, and cancelled (ca), given_up (gu), lost (tk)
local function hand_over(n, fields, owned)
  local out = { 'a', fields.a, 'm', fields.m,
    'o', ownership(owned.epoch, owned.instance, owned.slot, owned.committed, owned.version) }
  local step = number(owned.committed) + 1
  -- A step that is given up anyway (x 2 below) needs no suspicion.
  local suspected = number(owned.given_up) ~= step and suspicion(owned.lost, step)
  if suspected then append(out, 'y', suspected) end
  -- x 1: cancelled, x 2: given up; the owner does not run it.
  if listed(owned.cancelled, n) then
    append(out, 'x', '1')
  elseif owned.given_up == n then
    append(out, 'x', '2')
  end
  redis.call('XADD', BASE .. 'inbox:' .. owned.owner, '*', unpack(out))
end

-- Entries that are read together: each may have a message of many MiB, and a script gets copies.
local READ_TOGETHER = 4

-- Calls `act` for the entries of a stream behind one of them, `most` at most. Returns the last one, and how many.
local function each_entry(stream, after, most, act)
  local count, found = 0, nil
  repeat
    local wanted = math.min(READ_TOGETHER, most - count)
    found = redis.call('XRANGE', stream, '(' .. after, '+', 'COUNT', wanted)
    for _, entry in ipairs(found) do
      act(entry)
      after, count = entry[1], count + 1
    end
  until #found < wanted or count == most
  return after, count
end

-- The model of a sequence id.
local function model_of(sid)
  return string.match(sid, '^[^|]*')
end

-- Whether a sequence does what another one of its ensemble has done (shared/contract/ids.py).
local function follows_another(sid)
  return string.find(sid, '^[^|]*|[^|]*#[^/|]*|') ~= nil
end

-- The set of the sequences of a model that an executor owns.
local function owned_by(executor, model)
  return BASE .. 'owned:' .. executor .. ':' .. model
end

-- The journal of a sequence: the steps since START with their requests and replies, if its model keeps one.
local function journal_of(sid)
  return BASE .. 'journal:' .. sid
end

-- Whether a record's fields are possible. An unreadable number is nil here, or NaN, which no comparison accepts.
local function is_sound(state, accepted, committed, start, version)
  return STATES[state] and version and accepted and committed and start and committed >= 0 and accepted >= committed
    and start >= 0 and accepted < COUNTED_MAX and accepted % 1 == 0 and committed % 1 == 0 and start % 1 == 0
end

-- The set of a tenant's sequences that are not over, in this shard.
local function sequences_of(tenant) return BASE .. 'tenant:' .. tenant end

-- Whose a sequence is; '' if it has no tenant.
local function tenant_of(record) return redis.call('HGET', record, 'tn') or '' end

-- A sequence is over: it counts for its tenant no longer.
local function leave_tenant(record, sid)
  local tenant = tenant_of(record)
  if tenant ~= '' then redis.call('SREM', sequences_of(tenant), sid) end
end

-- Puts a sequence into the line of those that wait for a slot. Returns the entry.
-- kind: w new, r was paged, m has lost its slot; timeout: us, 0: none
local function line_up(sid, kind, version, timeout, tenant)
  return redis.call('XADD', BASE .. 'starts:' .. model_of(sid), '*', 'q', sid, 'v', version, 'u', timeout, 'k', kind,
    'o', tenant)
end

-- Streams of steps that were read: each is read once per call.
local read_streams

-- The steps of a sequence that lie in a stream: their entries, number n, gateway and token, and the epoch of an inbox's.
local function steps_in(stream, sid)
  if not read_streams[stream] then
    local found = {}
    each_entry(stream, '0-0', math.huge, function(entry)
      local fields = fields_of(entry)
      local n, _, gateway, token, of = step_of(fields.a)
      if not n then return end
      found[of] = found[of] or {}
      local epoch = number(string.match(fields.o or '', '^%d+'))
      table.insert(found[of], { entry = entry[1], n = number(n), gateway = gateway, token = token, epoch = epoch })
    end)
    read_streams[stream] = found
  end
  return read_streams[stream][sid] or {}
end

-- Calls `tell` for each caller that asked again for an open step.
local function each_joined(record, tell)
  local fields = redis.call('HGETALL', record)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 2) == 'j:' then
      for gateway, token in string.gmatch(fields[i + 1], '(%S+) (%S+);') do tell(gateway, token) end
    end
  end
end

-- Tells every known caller of a sequence at once that the sequence is lost. Returns a set of the callers told, as
-- `<gateway> <token>`. Callers are known from the record (asked again: j:<n>; latest: la), from the parked steps, and
-- the steps behind the last committed one in the inbox of the owner, if there is one. What the inbox holds of the
-- sequence is removed: an owner that cannot read the record forgets it.
local function tell_lost(record, parked, sid, owner, committed)
  local told = {}
  local function tell(gateway, token)
    if gateway and token and not told[gateway .. ' ' .. token] then
      told[gateway .. ' ' .. token] = true
      redis.call('XADD', BASE .. 'replies:' .. gateway, 'NOMKSTREAM', '*', token, lost_reply())
    end
  end
  each_joined(record, tell)
  local latest = redis.call('HGET', record, 'la') or ''
  tell(string.match(latest, '^%S+ (%S+) (%S+)'))
  tell(string.match(latest, '^%S+ %S+ %S+ (%S+) (%S+)'))
  each_entry(parked, '0-0', math.huge, function(entry)
    local _, _, gateway, token = step_of(fields_of(entry).a)
    tell(gateway, token)
  end)
  for _, step in ipairs(owner and steps_in(BASE .. 'inbox:' .. owner, sid) or {}) do
    if step.n > committed then tell(step.gateway, step.token) end
    redis.call('XDEL', BASE .. 'inbox:' .. owner, step.entry)
  end
  return told
end

-- Ends a sequence that cannot be read in full: its callers and its owner are told, its slot is freed, and a tombstone
-- stays. All of its keys follow from the record's key. Returns as `tell_lost`.
local function lose(record, cause)
  count_unreadable(record, cause)
  local sid = id_of(record)
  local model, parked = model_of(sid), parked_of(sid)
  local got = redis.call('HMGET', record, 'ow', 'be', 'bn', 'vr', 'nx', 'cm', 'dn', 'ep')
  local told = tell_lost(record, parked, sid, got[1] or calling_executor, number(got[6]))
  -- While a sequence waits for a slot, the waiting line counts its steps; and itself, if that is its first slot.
  if got[2] then
    if got[2] == got[3] then redis.call('HINCRBY', BASE .. 'line:' .. model, 'w', -1) end
    local waiting = (tonumber(got[5]) or 0) - (tonumber(got[6]) or 0)
    if got[4] and waiting > 0 and waiting % 1 == 0 and waiting < 1000000 then
      redis.call('HINCRBY', BASE .. 'line:' .. model, 's:' .. got[4], -waiting)
    end
  end
  -- Else a later leader would take its place in the line for that of a later sequence of the id, which it then forgets.
  for _, entry in pairs({ got[2], got[7] }) do
    -- `server.pcall`, not `redis.call`: it may be no entry's id.
    if entry then server.pcall('XDEL', BASE .. 'starts:' .. model, entry) end
  end
  leave_tenant(record, sid)
  redis.call('UNLINK', record, idle_of(sid), parked, checkpoint_of(sid), journal_of(sid))
  redis.call('ZREM', BASE .. 'deadlines:' .. model, sid)
  if got[1] then redis.call('SREM', owned_by(got[1], model), sid) end
  if got[1] and got[1] ~= calling_executor then
    -- Its owner hears of it by nothing else. What is no owner's name has no inbox.
    redis.call('XADD', BASE .. 'inbox:' .. got[1], 'NOMKSTREAM', '*', 'k', 'expired', 'q', sid, 'e', number(got[8]), 'd', 1)
  end
  redis.call('HINCRBY', BASE .. 'line:' .. model, 'over_o:' .. (got[4] or ''), 1)
  redis.call('HSET', record, 'st', 'o', 'cl', 1, 'nx', 0, 'cm', 0, 'sn', 1, 'vr', '')
  redis.call('PEXPIRE', record, 10 * 60 * 1000)
  -- The record's own epoch may be unreadable; the newest of the shard tells the scheduler that every epoch so far is
  -- over.
  redis.call('XADD', BASE .. 'feed:' .. model, '*', 'q', sid, 'e', number(redis.call('GET', BASE .. 'epoch')), 'k', 'u')
  return told
end

-- The text of a caught error, if it is a fault in what is stored: a Lua error (it begins with its place), or one of
-- Redis about a value. Every other error (no memory, a replica, a right that was withdrawn) is raised again.
local function fault_of(failure)
  -- `pcall` of a library gives an error of Redis as its text.
  if type(failure) ~= 'string' then error(failure) end
  local code = string.match(failure, '^(%u+) ')
  -- How Redis 7.0, and newer ones, begin where the user may not run a command of a script, or not with that key.
  local is_not_permitted = string.find(failure, '^ERR The user executing the script')
    or string.find(failure, '^ERR ACL failure in script')
  if is_not_permitted or code and code ~= 'ERR' and code ~= 'WRONGTYPE' then error({ err = failure }) end
  return failure
end

-- Calls `act` for one sequence. If it fails because of what is stored, the sequence is ended as lost. Returns true and
-- the result of `act`, or false and the callers that were told.
local function for_one(record, act, ...)
  local done, result = pcall(act, ...)
  if done then return true, result end
  return false, lose(record, fault_of(result))
end

-- Calls `act` for each sequence of a call with its keys, its id and its own arguments, as `for_one`. Returns the results.
-- keys, args: how many keys and arguments belong to the whole call; each: arguments of a sequence
-- lost: the result for a sequence that was ended as lost
local function for_each(keys, args, each, act, lost)
  local results = {}
  for k = keys + 1, #KEYS do
    local record, a = KEYS[k], args + #results * each
    local done, result = for_one(record, act, sequence_keys(record), id_of(record), unpack(ARGV, a + 1, a + each))
    results[#results + 1] = done and result or lost
  end
  return results
end

-- Counts of a model's waiting line (hash; shared/store/waiting_line.py reads them):
--   w            sequences that wait for their first slot
--   s:<v>        of version v: steps that wait together with their sequences
--   out:<v>      sequences that gave up their slot, being paged   in:<v>  paged ones that wanted a slot again
--   gone:<v>     paged ones that ended without a slot
--   lost:<v>, leaving:<v>, moved:<v>   sequences taken over from an owner that died, that left, that lives on
--   refused:<v>  steps of executors that were not the owners any more
--   begun:<v>    sequences that began; over_<k>:<v>  that are over, k: state of the tombstone, r: rejected while it waited
local function count_line(line, field, change)
  if change ~= 0 then redis.call('HINCRBY', line, field, change) end
end

-- A sequence without an open step gives up its slot. Its owner (ow) stays in the record, because the owner may send
-- its last commit a second time. The idle time goes on.
local function page(record, line, version)
  redis.call('HSET', record, 'st', 'p')
  redis.call('HDEL', record, 'in', 'sl')
  count_line(line, 'out:' .. version, 1)
end

-- A sequence is paused while this stands in the place of its entry in the starts stream (field be): it is moving, and
-- waits for no slot. No stream has this entry.
local NO_ENTRY = '0-1'

-- When a pause ends, and how much of the idle time was left when it began. pause: the record's field ps
local function times_of(pause)
  local until_ms, left = string.match(pause or '', '^(%d+) (%d+)$')
  return tonumber(until_ms) or 0, tonumber(left)
end

-- Unread entries of a feed from which on nothing is added that is not needed: no leader runs. Each sequence that takes a
-- spare slot adds two.
local FEED_MAX = 10000

-- Tells a model's leader what it would find out by itself, if later.
local function tell_leader(model, ...)
  local feed = BASE .. 'feed:' .. model
  if redis.call('XLEN', feed) < FEED_MAX then redis.call('XADD', feed, '*', ...) end
end

-- The leader is to look at a sequence's idle marker at that time already. It sleeps until the earliest time that it
-- knows, so it is told.
local function look_by(sid, at_ms)
  local model = model_of(sid)
  redis.call('ZADD', BASE .. 'deadlines:' .. model, 'LT', at_ms, sid)
  tell_leader(model, 'q', sid, 'e', 0, 'k', 'd', 'd', at_ms)
end

-- Ends the pause of a sequence. With open steps it waits for a slot, and so does one that is to keep its slot; any other
-- is paged. Without an open step its idle time goes on where it stood.
local function go_on(keys, sid)
  local got = redis.call('HMGET', keys.record, 'vr', 'nx', 'cm', 'pg', 'ps')
  local model, is_idle = model_of(sid), got[2] == got[3]
  redis.call('HDEL', keys.record, 'ps')
  -- The end of the pause. With open steps the next commit sets another time.
  redis.call('ZREM', BASE .. 'deadlines:' .. model, sid)
  if is_idle then
    local _, left = times_of(got[5])
    left = left or math.max(0, redis.call('PTTL', keys.idle))
    -- Over as well, behind a pause that nobody ended in time: steps hear so by now.
    if redis.call('PEXPIRE', keys.idle, left) == 0 then left = 0 end
    look_by(sid, clock_ms() + left)
  end
  if is_idle and got[4] then
    redis.call('HDEL', keys.record, 'be')
    page(keys.record, BASE .. 'line:' .. model, got[1])
  else
    redis.call('HSET', keys.record, 'be', line_up(sid, 'm', got[1], '0', tenant_of(keys.record)))
  end
  return 1
end

-- A sequence leaves the waiting line together with its steps. state: w or m
local function leave_line(line, state, version, accepted, committed)
  if state == 'w' then count_line(line, 'w', -1) end
  count_line(line, 's:' .. version, committed - accepted)
end

-- The sequence's state is lost since this step: every later step is answered with an error, in its turn, until a START.
-- start: the latest accepted START. If that is not a later step, the sequence accepts nothing but a START from now on.
local function lose_state(record, since, kind, start)
  redis.call('HSET', record, 'vd', since, 'vk', kind)
  if start <= since then redis.call('HSET', record, 'cl', 1) end
end

-- A sequence of a version is over. kind: as above
local function count_over(sid, kind, version)
  count_line(BASE .. 'line:' .. model_of(sid), 'over_' .. kind .. ':' .. (version or ''), 1)
end

-- Spare slots are free ones that a model's leader has laid out: `submit` gives them to sequences that begin or return, and
-- a sequence that is over or paged gives its slot back to them. So the leader need not be asked; it reads of it in the
-- feed.
local function spares_of(executor, model)
  return BASE .. 'spares:' .. executor .. ':' .. model
end

-- The spare slots of a version, as `<slot>.<instance> ` one after the other; '' when all are taken. nil if the model's
-- present leader has laid out none.
local function spares_left(spares, model, version)
  local got = redis.call('HMGET', spares, 't', 'v:' .. version)
  return got[2] and got[1] == redis.call('GET', BASE .. 'fence:' .. model) and got[2] or nil
end

-- Bytes of a version's spare slots at an executor from which on no slot comes back to them.
local SPARES_BYTES = 4096

-- Makes a sequence's slot, which it does not need any more, a spare one. 0 if it is for the leader to give, else 1.
local function spare_again(record, model, version)
  local got = redis.call('HMGET', record, 'ow', 'sl', 'in')
  if not (got[1] and got[2] and got[3]) then return 0 end
  local spares = spares_of(got[1], model)
  local left = spares_left(spares, model, version)
  if not left or #left > SPARES_BYTES then return 0 end
  redis.call('HSET', spares, 'v:' .. version, left .. got[2] .. '.' .. got[3] .. ' ')
  return 1
end

-- Ends a sequence: its slot is reported to the scheduler's feed, and its record becomes a tombstone.
-- keys: record, idle, parked, checkpoint, deadlines; for a sequence with a slot also owned, feed
local function release(keys, sid, kind, epoch, version, tombstone_ms)
  count_over(sid, kind, version)
  -- The checkpoint of a state that grows has thousands of fields: another thread of Redis frees them.
  redis.call('UNLINK', keys.idle, keys.parked, keys.checkpoint)
  redis.call('PEXPIRE', journal_of(sid), tonumber(tombstone_ms))
  leave_tenant(keys.record, sid)
  redis.call('ZREM', keys.deadlines, sid)
  if keys.owned then
    redis.call('SREM', keys.owned, sid)
    local spare = spare_again(keys.record, model_of(sid), version)
    redis.call('XADD', keys.feed, '*', 'q', sid, 'e', epoch, 'k', kind, 's', spare)
  end
  redis.call('HDEL', keys.record, 'ow', 'in', 'sl', 'vd', 'vk', 'be', 'du', 'pg', 'ca', 'tk', 'tr', 'gu', 'fl', 'og', 'mk',
    'en', 'es', 'ps')
  redis.call('HSET', keys.record, 'st', kind, 'cl', '1')
  redis.call('PEXPIRE', keys.record, tombstone_ms)
end

-- each call
KEYS, ARGV, server = keys, args, offered()
try, BASE = server.pcall, string.match(KEYS[1], '^(.-}:)')
on_removed, now_ms, calling_executor = nil, nil, nil
outgoing, gateways, read_streams = {}, {}, {}
if is_node == nil then is_node = not server.pcall('CLUSTER', 'SLOTS').err end
-- While a Cluster moves the slot of these keys, a key that this node lacks may be at the other one. A script that met
-- such a key would fail half-way, so it does not begin. No key has this name.
if is_node and type(server.pcall('EXISTS', BASE .. 'none')) == 'table' then
  return { err = 'TRYAGAIN the slot of ' .. BASE .. ' is on its way to another node' }
end
