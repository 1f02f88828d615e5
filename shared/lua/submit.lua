-- Accepts steps of sequences, in the order given. One call carries all steps of one shard that a gateway gathered.
--
-- KEYS   per step: record, idle marker, parked steps, starts stream of the model
-- ARGV   1 prefix of this shard's inboxes   2 bound of the backlog   3 bound of steps in flight per sequence
--        per step: sequence id, flags (1 START, 2 END, 4 a sequence may start implicitly, 8 the mesh holds its state,
--                  16 the sequence is of this one request, 32 it may be paged),
--                  request id or '', expected step since START or '', version, gateway, token (a gateway counts
--                  them upwards, hexadecimal, in the order in which it sends), timeout us, message,
--                  when it was first sent (Redis clock, ms) if it is sent again without knowing what became of it, or -1
-- reply  per step {code, step, extra}:
--         0 accepted by the owner    1 accepted, waits for a slot     2 repeated: extra is the stored reply
--         3 repeated while in flight: the reply will also come here; for 0, 1 and 3 extra is the sequence's birth
--        -1 never seen  -2 ended  -3 expired  -4 failed at START  -5 lost  -6 backlog full  -7 too many in flight
--        -8 wrong step  -9 cancelled  -11 late: steps of another gateway, or later ones of its own, came in since it was
--        first sent; for these, step is the last committed one (since START) and extra the one expected for -8
-- atomic each step's number, its place in the inbox and the record change together.
-- The inbox's key follows from the record (its owner); it carries the same hash tag as the declared keys.

local GONE = { e = -2, x = -3, f = -4, o = -5, c = -9 }

local function deliver(step, record, n, flags)
  redis.call('XADD', ARGV[1] .. record.ow, '*', 'q', step.sid, 'n', n, 'f', flags, 'e', record.ep, 'i', record.instance,
    'l', record.slot, 'c', record.cm, 'v', record.version, 'g', step.gateway, 't', step.token, 'm', step.message)
end

local function park(step, n, flags)
  redis.call('XADD', step.parked, '*', 'q', step.sid, 'n', n, 'f', flags,
    'g', step.gateway, 't', step.token, 'm', step.message)
end

-- Whether the latest step was accepted under this very token: its reply comes without being asked for again.
local function is_latest(step, latest)
  return string.match(latest or '', '^%S+ (.*)') == step.gateway .. ' ' .. step.token
end

-- A retry of a step that was accepted before: the stored reply, or a place beside the caller that waits for it.
local function repeated(step, n, record)
  if n > record.cm then
    if is_latest(step, record.latest) then return { 3, n, record.birth } end
    local field = 'j:' .. n
    local joined = redis.call('HGET', step.record, field) or ''
    redis.call('HSET', step.record, field, joined .. step.gateway .. ' ' .. step.token .. ';')
    return { 3, n, record.birth }
  end
  local stored = redis.call('HMGET', step.record, 'ls', 'lp')
  if number(stored[1]) == n then
    return { 2, n, stored[2] }
  end
  return { -8, record.cm - record.start + 1, record.nx - record.start + 2 }
end

local function accepted_now(step)
  return clock_ms() .. ' ' .. step.gateway .. ' ' .. step.token
end

local function patience_ms(step)
  return clock_ms() + math.ceil(tonumber(step.timeout) / 1000)
end

-- A waiting sequence goes when the first of its steps runs out of patience (triton-spec 1.7); the scheduler is told.
local function lower_deadline(step, record)
  local deadline = patience_ms(step)
  if record.deadline and tonumber(record.deadline) <= deadline then return end
  if record.news then redis.call('XDEL', step.starts, record.news) end
  local news = redis.call('XADD', step.starts, '*', 'k', 'd', 'q', step.sid, 'v', record.version, 'b', record.waits,
    'd', deadline)
  redis.call('HSET', step.record, 'dl', deadline, 'dn', news)
end

-- A step that is sent again although it is not known what became of it: what the record still holds of it was looked
-- for before. Once other steps came in, its own trace may be gone.
local function is_late(step, latest)
  if step.since < 0 or not latest then return false end
  local ms, gateway, token = string.match(latest, '(%S+) (%S+) ?(%S*)')
  if gateway ~= step.gateway then return tonumber(ms) >= step.since end
  return (tonumber(token, 16) or -1) >= (tonumber(step.token, 16) or 0)
end

local function create(step, flags)
  if redis.call('XLEN', step.starts) >= tonumber(ARGV[2]) then
    return { -6, 0, '' }
  end
  redis.call('DEL', step.record)
  local entry = redis.call('XADD', step.starts, '*', 'q', step.sid, 'v', step.version, 'u', step.timeout, 'k', 'w')
  redis.call('HSET', step.record, 'st', 'w', 'nx', 1, 'cm', 0, 'ck', 0, 'sn', 1, 'cl', has(flags, END) and 1 or 0,
    'vr', step.version, 'du', has(flags, DURABLE) and 1 or 0, 'be', entry,
    'bn', entry, 'la', accepted_now(step))
  if has(flags, PAGEABLE) then redis.call('HSET', step.record, 'pg', 1) end
  if tonumber(step.timeout) > 0 then redis.call('HSET', step.record, 'dl', patience_ms(step)) end
  if step.request_id ~= '' then
    redis.call('HSET', step.record, 'r:' .. step.request_id, 1)
  end
  redis.call('SET', step.idle, '1')
  park(step, 1, bit.bor(flags, START))
  return { 1, 1, entry }
end

-- A paged sequence wants a slot again, in its turn among those who wait. Where and when it had its last one tells
-- whether its model was reloaded meanwhile.
local function return_to_line(step, record)
  local entry = redis.call('XADD', step.starts, '*', 'q', step.sid, 'v', record.version, 'u', '0', 'k', 'r',
    'e', record.ep, 'o', record.ow)
  redis.call('HSET', step.record, 'st', 'm', 'be', entry)
end

local function submit(step, flags)
  local got = redis.call('HMGET', step.record, 'st', 'ow', 'in', 'sl', 'ep', 'nx', 'cm', 'cl', 'sn',
    'r:' .. step.request_id, 'vr', 'bn', 'la', 'be', 'dl', 'dn', 'vk', 'vd')
  local state = got[1]
  local begins = has(flags, START)
  if not state then
    if begins or has(flags, IMPLICIT) then return create(step, flags) end
    return { -1, 0, '' }
  end
  local record = { ow = got[2], instance = got[3], slot = got[4], ep = got[5], nx = number(got[6]),
    cm = number(got[7]), start = number(got[9]), version = got[11],
    birth = got[12] or '', latest = got[13], waits = got[14], deadline = got[15], news = got[16] }
  local done = record.cm - record.start + 1
  if step.request_id ~= '' and got[10] then
    return repeated(step, number(got[10]), record)
  end
  if step.expected ~= '' and not (begins and step.expected == '1' and got[8] == '1') then
    local n = record.start + tonumber(step.expected) - 1
    if n >= record.start and n <= record.nx then return repeated(step, n, record) end
    if n ~= record.nx + 1 then return { -8, done, record.nx - record.start + 2 } end
  end
  if is_late(step, record.latest) then return { -11, done, '' } end
  if GONE[state] then
    if begins or has(flags, IMPLICIT) then return create(step, flags) end
    return { GONE[state], done, '' }
  end
  if record.nx - record.cm >= tonumber(ARGV[3]) then
    return { -7, done, '' }
  end
  if (state == 'l' or state == 'p') and record.nx == record.cm and redis.call('PERSIST', step.idle) == 0 then
    -- The marker's time ended: the reaper has just not come by yet. A START takes over what the sequence had.
    if not (begins or has(flags, IMPLICIT)) then return { -3, done, '' } end
    flags, begins = bit.bor(flags, START), true
    redis.call('SET', step.idle, '1')
  end
  if got[8] == '1' and not begins then
    if not has(flags, IMPLICIT) then return { GONE[number(got[18]) >= record.start and got[17] or 'e'], done, '' } end
    flags, begins = bit.bor(flags, START), true
  end
  local n = record.nx + 1
  local change = { 'nx', n, 'la', accepted_now(step) }
  local function set(field, value)
    change[#change + 1] = field
    change[#change + 1] = value
  end
  if begins then set('sn', n) end
  if has(flags, END) then set('cl', 1) elseif begins then set('cl', 0) end
  if step.request_id ~= '' then set('r:' .. step.request_id, n) end
  redis.call('HSET', step.record, unpack(change))
  if state == 'l' then
    deliver(step, record, n, flags)
    return { 0, n, record.birth }
  end
  if state == 'p' then return_to_line(step, record) end
  park(step, n, flags)
  if state == 'w' and tonumber(step.timeout) > 0 then lower_deadline(step, record) end
  return { 1, n, record.birth }
end

local replies = {}
for i = 1, #KEYS / 4 do
  local k, a = (i - 1) * 4, 3 + (i - 1) * 10
  replies[i] = submit({
    record = KEYS[k + 1], idle = KEYS[k + 2], parked = KEYS[k + 3], starts = KEYS[k + 4],
    sid = ARGV[a + 1], request_id = ARGV[a + 3], expected = ARGV[a + 4], version = ARGV[a + 5],
    gateway = ARGV[a + 6], token = ARGV[a + 7], timeout = ARGV[a + 8], message = ARGV[a + 9],
    since = tonumber(ARGV[a + 10]),
  }, tonumber(ARGV[a + 2]))
end
return replies
