-- Accepts steps of sequences, in the order given. One call carries all steps that a gateway has gathered for one shard.
--
-- KEYS   per step: the record of its sequence
-- ARGV   1 most sequences of a model that wait for their first slot   2 most open steps per sequence
--        3 steps of a sequence whose digests are remembered   4 most live sequences of a model
--        5 most callers that wait for one step by a retry
--        6 encoded reply for the oldest of these callers when there is one too many; its step is 0xffffffff and stands
--          for the last accepted step (since START)
--        per step: flags (1 START, 2 END, 4 a sequence may start implicitly, 8 the mesh holds its state,
--                  16 the sequence consists of this one request, 32 it may be paged, 128 its caller is to be told
--                  how long it waits for a slot, 256 what most steps leave out follows, 1024 it is a model's call, and
--                  no other one has its digest),
--                  digest of its request id and content (12 bytes) or '', expected step since START or '', version,
--                  gateway, token (hexadecimal; each gateway counts its tokens upwards in the order in which it sends),
--                  message
--        with 256: timeout us, when it was first sent (Redis clock, ms) if the gateway sends it again without knowing
--                  what became of it, else -1,
--                  its tenant, and most live sequences of the tenant in this shard (0: any number),
--                  the executor of which a new sequence may take a spare slot, or ''
-- reply  per step {code, step, run, extra, cut_off}, without what is '' at its end. For a refusal, step is the last
--        accepted step (since START): it does not depend on how far the owner has come with the accepted ones.
--        run names what began with a START: the record's birth, a dot, the number of its latest START. No other run of
--        any sequence has this name. '' for a refusal, and for a step before the latest START
--        cut_off names the run that an accepted START has cut off: it was open
--         0 accepted, delivered to the owner
--         1 accepted, waits for a slot
--         2 repeated; extra is the stored reply
--         3 repeated while the step is open: the reply will come to this caller too; extra is the birth. So will the
--           answers of a decoupled model, from the first one that is kept, also if the step is not open any more
--        -1 never seen  -2 ended  -3 expired  -4 failed at START  -5 lost
--        -6 too many sequences; extra says which: `waiting` or `live`
--        -7 too many open steps  -8 wrong step: the next one is expected  -9 cancelled
--       -11 late: other steps were accepted since it was first sent, so it may have been accepted and forgotten
--       -12 it was answered, and its reply is kept no longer
--       -13 the sequence exists, and is beyond its first step
--       -14 its tenant has as many live sequences as it may
-- atomic each step's number, its place in the inbox and the record change together.

local WAITING_MAX, OPEN_MAX, REMEMBERED, LIVE_MAX, JOINED_MAX, GAVE_WAY

-- The reply codes, by their names in `SubmitCode` (shared/store/scripts.py). -10 means nothing.
local DELIVERED, WAITING, REPEATED, JOINED = 0, 1, 2, 3
local NEVER_SEEN, ENDED, EXPIRED, FAILED, LOST = -1, -2, -3, -4, -5
local BACKLOG_FULL, BUSY, WRONG_STEP, CANCELLED = -6, -7, -8, -9
local LATE, ANSWERED, EXISTS, QUOTA = -11, -12, -13, -14

-- Flag of a step that a model calls for: its digest is that of the call's name alone. No other script is told it.
local NAMED = 1024

-- Reply code by the state of a tombstone.
local GONE = { e = ENDED, x = EXPIRED, f = FAILED, o = LOST, c = CANCELLED }

-- The stream of the sequences of the step's model that wait, and the counts of the model's waiting line.
local function starts_of(step) return BASE .. 'starts:' .. model_of(step.sid) end
local function line_of(step) return BASE .. 'line:' .. model_of(step.sid) end

-- Puts a step into its owner's inbox.
-- at: of the step's flags in ARGV; the other arguments as in the record
local function deliver(at, sid, owner, n, flags, epoch, instance, slot, committed, version)
  local inbox = BASE .. 'inbox:' .. owner
  local delivered = redis.call('XADD', inbox, 'NOMKSTREAM', '*',
    'a', about_step(n, flags, ARGV[at + 4], ARGV[at + 5], sid),
    'o', ownership(epoch, instance, slot, committed, version), 'm', ARGV[at + 6])
  if delivered then return end
  -- The inbox does not exist: this is the owner's first step, or the record's owner does not exist. The owner's set of
  -- owned sequences was written together with the record, so it tells the two cases apart.
  if redis.call('SISMEMBER', owned_by(owner, model_of(sid)), sid) == 0 then
    error('the owner of a sequence cannot be read')
  end
  -- An entry added and removed leaves an empty stream, which NOMKSTREAM then finds.
  redis.call('XDEL', inbox, redis.call('XADD', inbox, '*', 'k', ''))
  deliver(at, sid, owner, n, flags, epoch, instance, slot, committed, version)
end

-- Keeps a step until its sequence has an owner.
local function park(step, n, flags, version)
  count_line(line_of(step), 's:' .. version, 1)
  redis.call('XADD', step.parked, '*', 'a', about_step(n, flags, step.gateway, step.token, step.sid), 'm', step.message)
end

-- Whether the latest step was accepted under this very token: then its reply comes to this caller anyway.
local function is_latest(step, latest)
  return string.match(latest or '', '^%S+ (%S+ %S+)') == step.gateway .. ' ' .. step.token
end

-- The caller of a retry uses an open sequence from now on: when another connection is closed, the sequence is not
-- orphaned. A sequence that was orphaned before has its idle time back.
local function use_again(step, record)
  if record.closed then return end
  local accepted = string.match(record.latest, '^%S+ %S+ %S+')
  redis.call('HSET', step.record, 'la', accepted .. ' ' .. step.gateway .. ' ' .. step.token)
  if not record.orphaned then return end
  redis.call('HDEL', step.record, 'og')
  if record.accepted == record.committed then
    redis.call('PEXPIRE', step.idle, math.max(1, tonumber(record.orphaned) - clock_ms()))
  end
end

-- Accepted steps with a request id: of each the digest and the number (modulo 2^32), ENTRY bytes in all. A step
-- rewrites only the field of the last RECENT steps; when that field is full, its steps are added to the older ones.
local DIGEST, ENTRY, RECENT = 12, 16, 8

local function four_bytes(n)
  return string.char(math.floor(n / 16777216) % 256, math.floor(n / 65536) % 256, math.floor(n / 256) % 256, n % 256)
end

-- The number of the step that is remembered at byte `at`. Only its low 32 bits are stored; newest, the last accepted
-- step, gives the others.
local function step_at(ids, at, newest)
  local a, b, c, d = string.byte(ids, at + DIGEST, at + ENTRY - 1)
  return newest - (newest - (((a * 256 + b) * 256 + c) * 256 + d)) % 4294967296
end

-- The number of the last step with this digest. (An earlier run of the same client may have had the same digest.)
local function step_named(ids, digest, newest)
  local found = nil
  local at = string.find(ids, digest, 1, true)
  while at do
    -- A digest can also occur across two entries, by chance; only one at the begin of an entry counts.
    if (at - 1) % ENTRY == 0 then found = at end
    at = string.find(ids, digest, at + 1, true)
  end
  return found and step_at(ids, found, newest)
end

-- The digest that is remembered of step n, nil if there is none.
local function digest_of(ids, n, newest)
  for at = #ids - ENTRY + 1, 1, -ENTRY do
    if step_at(ids, at, newest) == n then return string.sub(ids, at, at + DIGEST - 1) end
  end
end

-- The remembered ids, without those of steps that are both answered and too old.
local function with_recent(ids, n, committed)
  local from, oldest = 1, math.min(committed, n - REMEMBERED)
  while from <= #ids and step_at(ids, from, n) <= oldest do from = from + ENTRY end
  return string.sub(ids, from)
end

-- Remembers the digest of step n, if it has one.
-- recent, older: the record's fields rd and ro; change: fields and values to be written to the record, which this
-- extends
local function remember(digest, n, recent, older, committed, change)
  if digest == '' then return end
  if #recent >= RECENT * ENTRY then
    append(change, 'ro', with_recent(older .. recent, n, committed))
    recent = ''
  end
  append(change, 'rd', recent .. digest .. four_bytes(n))
end

-- Notes that this caller waits for step n too, once; false if it does already. A caller that asks again and again has
-- usually stopped waiting under its older tokens: so if there are too many, the oldest gives way, and is told. The first
-- caller stands in the inbox entry, and never gives way.
local function join(step, n, record)
  local field, caller = 'j:' .. n, step.gateway .. ' ' .. step.token .. ';'
  local joined = redis.call('HGET', step.record, field) or ''
  if string.find(';' .. joined, ';' .. caller, 1, true) then return false end
  local _, count = string.gsub(joined, ';', '')
  if count >= JOINED_MAX then
    local gateway, token, rest = string.match(joined, '^(%S+) (%S+);(.*)')
    local function last_step() return four_bytes(record.last_step) end
    local reply = string.gsub(GAVE_WAY, string.rep('\255', 4), last_step)
    answer(gateway, token, reply)
    joined = rest
  end
  redis.call('HSET', step.record, field, joined .. caller)
  return true
end

-- Sends the caller what is kept of a decoupled model's answers to step n, except the last one.
local function send_kept(step, n, first, last)
  for i = first, last do
    local reply = redis.call('HGET', step.record, answer_field(n, i))
    if reply then answer(step.gateway, step.token, reply) end
  end
end

-- Answers a retry of step n, which was accepted before: with the stored reply, or with a place beside the caller that
-- waits for it. unkept: the code if the reply is not kept any more
local function repeated(step, n, record, unkept)
  -- A step before the latest START belongs to an earlier run, whose name is not known any more.
  local run = n < record.start and '' or record.birth .. '.' .. record.start
  if n > record.committed and is_latest(step, record.latest) then return { JOINED, n, run, record.birth } end
  use_again(step, record)
  if n > record.committed then
    if join(step, n, record) then
      local count, first = answers_of(step.record, n)
      send_kept(step, n, first, count)
    end
    return { JOINED, n, run, record.birth }
  end
  local reply = redis.call('HGET', step.record, 'p:' .. n)
  if reply then
    local list = ' ' .. (redis.call('HGET', step.record, 'rk') or '')
    local first, last = string.match(list, ' ' .. n .. ':%d+/(%d+)/(%d+)')
    if not first then return { REPEATED, n, run, reply } end
    check_answers(step.record, tonumber(first), tonumber(last))
    -- All of them take the same way, so they come in their order.
    send_kept(step, n, tonumber(first), tonumber(last))
    answer(step.gateway, step.token, reply)
    return { JOINED, n, run, record.birth }
  end
  return { unkept, record.last_step }
end

-- Whether the idle marker has run out, and only the scheduler has not ended the sequence yet.
local function is_idle_for_too_long(step, record)
  return not record.closed and record.accepted == record.committed and redis.call('EXISTS', step.idle) == 0
end

-- Whether a step that its gateway sends again can have been accepted the first time. If it was, then the latest
-- accepted step is this one or a later one: of another gateway, not before it was first sent; of its own, with no lower
-- token.
local function may_have_come(step, latest)
  if step.since < 0 or not latest then return false end
  local ms, gateway, token = string.match(latest, '(%S+) (%S+) ?(%S*)')
  if gateway ~= step.gateway then return tonumber(ms) >= step.since end
  return (tonumber(token, 16) or -1) >= (tonumber(step.token, 16) or 0)
end

-- The number of the step that this request repeats, found by its digest; nil if the step is new.
--
-- A client may use the same request ids in each run, under the same correlation id, even with the same inputs. So:
-- * A request that the gateway itself sends again is the very same request: every match is a repetition.
-- * A match before the latest START belongs to an earlier run: the step is new.
-- * A match with the first step may be a retry or the first step of a new run, if the request can begin a sequence now
--   (it has START; or START may be left out, and the sequence is closed or was idle for too long). It is a retry only
--   if no step has followed the first one, and the sequence was not idle for too long, and is open or closed by the END
--   of that step itself. Otherwise a new run begins. A client that retries its first step loses nothing by that: it has
--   seen no answer of the sequence, so it repeats the steps that followed as well.
-- * Every other match is a repetition.
--
-- A model's call has a name that no other call has, in whichever run. A match is a repetition, however many steps have
-- followed: the call may have been held up on its way, or its executor be one that has lost the step long ago. So it is
-- when the sequence is over: a new run would lack the calls that followed, which are known. Only a START that nothing
-- has followed begins anew what is over without END: with that nobody goes on.
local function by_name(step, flags, record)
  local n = step.digest ~= '' and step_named(record.ids, step.digest, record.accepted)
  if not n then return nil end
  if record.may_have_come then return n end
  local follows = n < record.accepted
  if has(flags, NAMED) and follows then return n end
  if n < record.start then return nil end
  local idle = n == record.start and is_idle_for_too_long(step, record)
  local first = has(flags, START) or n == record.start and has(flags, IMPLICIT) and (record.closed or idle)
  if first and (follows or idle or record.closed and record.cause ~= 'e') then return nil end
  return n
end

-- Judges a step by the number (since START) that the client gave it: the answer to a retry, a refusal, or nil if the
-- step is new. A first step with the number 1 begins a new sequence if the last one is over; a START may be left out
-- there as in `by_name`. While END is open, only a request id can tell that step from a retry.
local function by_number(step, flags, record)
  local n = record.start + tonumber(step.expected) - 1
  local begins = step.expected == '1' and has(flags, START)
  local may_begin = begins or step.expected == '1' and has(flags, IMPLICIT)
  local over = GONE[record.state] or record.closed and (record.cause ~= 'e' or step.digest ~= '')
  if may_begin and not record.may_have_come and (over or is_idle_for_too_long(step, record)) then return nil end
  -- The step is new, or it comes to a closed sequence. The rest of `submit` then says why that is closed, which tells
  -- the client more than the number that was expected.
  local is_next = n == record.accepted + 1
  if is_next or n > record.accepted and (record.closed or is_idle_for_too_long(step, record)) then return nil end
  local wrong = { WRONG_STEP, record.last_step }
  if n < record.start or n > record.accepted then return wrong end
  local exists = begins and not record.closed
  -- The number was given before, but to a request with another id or content: this is no retry.
  if step.digest ~= '' and (digest_of(record.ids, n, record.accepted) or step.digest) ~= step.digest then
    return exists and { EXISTS, record.last_step } or wrong
  end
  return repeated(step, n, record, exists and EXISTS or ANSWERED)
end

-- Whether a step that would have been recognised by its digest or its number is known not to have been accepted: all
-- digests since it was first sent are remembered, or no run but the present one can have had its number. A record that
-- is younger than the first sending proves nothing: the record before it may have had the step.
local function is_surely_new(step, record)
  local born_ms = tonumber(string.match(record.birth, '^%d+'))
  if not born_ms or born_ms >= step.since then return false end
  return step.digest ~= '' and record.accepted <= REMEMBERED or step.expected ~= '' and record.start == 1
end

-- The time of this call as text: Lua takes long to write a number.
local now_text

local function accepted_now(gateway, token)
  now_text = now_text or clock_ms() .. ' '
  return now_text .. gateway .. ' ' .. token
end

-- Whether a record says where a live sequence is.
local function is_placed(owner, instance, slot, epoch)
  return owner and tonumber(instance) and tonumber(slot) and tonumber(epoch)
end

local function patience_ms(step)
  return clock_ms() + math.ceil(tonumber(step.timeout) / 1000)
end

-- A waiting sequence is refused when the timeout of the first of its steps ends (triton-spec 1.7). The scheduler is
-- told of the earlier deadline, and an older message about it is removed.
local function lower_deadline(step, record)
  local deadline, got = patience_ms(step), redis.call('HMGET', step.record, 'dl', 'dn', 'be')
  if got[1] and tonumber(got[1]) <= deadline then return end
  if got[2] then redis.call('XDEL', starts_of(step), got[2]) end
  local news = redis.call('XADD', starts_of(step), '*', 'k', 'd', 'q', step.sid, 'v', record.version, 'b', got[3] or '',
    'd', deadline)
  redis.call('HSET', step.record, 'dl', deadline, 'dn', news)
end

-- Removes sequences that are over from a tenant's set. Nothing but what cannot be read leaves one there (`lose`), or a
-- set that was made by hand. Sixteen members are looked at whenever the tenant has as many sequences as it may.
local function clear(tenant)
  local sequences = sequences_of(tenant)
  for _, sid in ipairs(redis.call('SRANDMEMBER', sequences, 16)) do
    local got = redis.call('HMGET', BASE .. 'seq:' .. sid, 'st', 'tn')
    if not got[1] or TOMBSTONES[got[1]] or got[2] ~= tenant then redis.call('SREM', sequences, sid) end
  end
end

-- Counts a new sequence for its tenant; false if the tenant has as many as it may.
local function enter_tenant(step)
  local sequences, most = sequences_of(step.tenant), number(step.tenant_max)
  if most > 0 and redis.call('SCARD', sequences) >= most then
    clear(step.tenant)
    if redis.call('SCARD', sequences) >= most then return false end
  end
  redis.call('SADD', sequences, step.sid)
  return true
end

-- Bytes of the spare slots among which the lowest is looked for.
local LOOKED_THROUGH = 256

-- Takes a spare slot of an executor, the lowest as the leader would: so batches of rows by slot stay dense. Returns slot
-- and instance, or nil.
local function take_spare(executor, model, version)
  if executor == '' or redis.call('XLEN', BASE .. 'feed:' .. model) >= FEED_MAX then return nil end
  local spares = spares_of(executor, model)
  local left = spares_left(spares, model, version)
  if not left then return nil end
  local lowest, of_instance, from, to = nil, nil, nil, nil
  for begins, slot, instance, ends in string.gmatch(string.sub(left, 1, LOOKED_THROUGH), '()(%d+)%.(%d+) ()') do
    if not lowest or tonumber(slot) < tonumber(lowest) then
      lowest, of_instance, from, to = slot, instance, begins, ends
    end
  end
  if not lowest then return nil end
  redis.call('HSET', spares, 'v:' .. version, string.sub(left, 1, from - 1) .. string.sub(left, to))
  return lowest, of_instance
end

-- Gives a sequence a spare slot that was taken for it, and tells the leader so. Returns its epoch, and the feed's entry.
local function seat(step, model, version, tenant, owner, slot, instance)
  local epoch = redis.call('INCR', BASE .. 'epoch')
  -- A leader of a release that knew no spare slots takes the entry for the end of epoch 0, which no sequence has.
  local entry = redis.call('XADD', BASE .. 'feed:' .. model, '*', 'q', step.sid, 'e', 0, 'k', 't', 'n', epoch,
    'x', owner, 'i', instance, 'l', slot, 'v', version, 'o', tenant)
  redis.call('HSET', step.record, 'st', 'l', 'ow', owner, 'in', instance, 'sl', slot, 'ep', epoch)
  redis.call('SADD', owned_by(owner, model), step.sid)
  return epoch, entry
end

-- Writes what every new record has, beside its state.
local function write_first(step, flags, birth)
  local change = { 'nx', 1, 'cm', 0, 'ck', 0, 'sn', 1, 'cl', has(flags, END) and 1 or 0, 'vr', step.version,
    'du', has(flags, DURABLE) and 1 or 0, 'bn', birth, 'la', accepted_now(step.gateway, step.token) }
  if has(flags, PAGEABLE) then append(change, 'pg', 1) end
  if step.tenant ~= '' then append(change, 'tn', step.tenant) end
  if step.digest ~= '' then append(change, 'rd', step.digest .. four_bytes(1)) end
  if (step.before or '') ~= '' then append(change, 'rp', step.before) end
  redis.call('HSET', step.record, unpack(change))
  redis.call('SET', step.idle, '1')
end

-- Begins a sequence in a spare slot, whose executor gets the step at once.
local function begin_in_slot(step, flags, model, slot, instance)
  local epoch, entry = seat(step, model, step.version, step.tenant, step.prefers, slot, instance)
  -- The letter: no entry of the starts stream, which names the other sequences' births, is called so.
  local birth = entry .. 't'
  write_first(step, flags, birth)
  redis.call('HSET', step.record, 'fe', epoch)
  tally_slot_wait(model, step.version, 'start', 0)
  deliver(step.at, step.sid, step.prefers, 1, bit.bor(flags, START), epoch, instance, slot, 0, step.version)
  return { DELIVERED, 1, birth .. '.1' }
end

-- Begins a sequence that waits for the leader to give it a slot.
local function begin_in_line(step, flags)
  local entry = line_up(step.sid, 'w', step.version, step.timeout, step.tenant)
  count_line(line_of(step), 'w', 1)
  write_first(step, flags, entry)
  redis.call('HSET', step.record, 'st', 'w', 'be', entry)
  if tonumber(step.timeout) > 0 then redis.call('HSET', step.record, 'dl', patience_ms(step)) end
  park(step, 1, bit.bor(flags, START), step.version)
  return { WAITING, 1, entry .. '.1' }
end

-- Begins a new sequence, with this step as its first. last_step, ids: of the old one, for a refusal, and of its steps
local function create(step, flags, last_step, ids)
  local model, waiting = model_of(step.sid), number(redis.call('HGET', line_of(step), 'w'))
  -- Each that waits has an entry there: a count that was not corrected when a record could not be read harms nobody.
  if waiting > 0 then waiting = math.min(waiting, redis.call('XLEN', starts_of(step))) end
  if waiting >= WAITING_MAX then return { BACKLOG_FULL, last_step, '', 'waiting' } end
  -- A sequence has an entry among the deadlines at the latest from its first commit, and until it is over, also while it
  -- is paged. So the number of entries bounds the live sequences.
  if redis.call('ZCARD', BASE .. 'deadlines:' .. model) >= LIVE_MAX then
    return { BACKLOG_FULL, last_step, '', 'live' }
  end
  if step.tenant ~= '' and not enter_tenant(step) then return { QUOTA, last_step } end
  count_line(line_of(step), 'begun:' .. step.version, 1)
  -- Nobody overtakes those who wait.
  local slot, instance = nil, nil
  if waiting <= 0 then slot, instance = take_spare(step.prefers, model, step.version) end
  if has(flags, NAMED) then
    -- A late call of the record before is not to run in this one.
    step.before = string.sub((redis.call('HGET', step.record, 'rp') or '') .. ids, -REMEMBERED * ENTRY)
  end
  redis.call('DEL', step.record)
  if slot then return begin_in_slot(step, flags, model, slot, instance) end
  return begin_in_line(step, flags)
end

-- A paged sequence wants a slot again. It takes a spare one of its last owner, if its next owner needs no more than the
-- checkpoint and this step, and returns its place; or it takes its turn in the same line as new sequences.
local function return_from_page(step, record)
  local model, tenant = model_of(step.sid), tenant_of(step.record)
  count_line(line_of(step), 'in:' .. record.version, 1)
  local got = redis.call('HMGET', step.record, 'ck', 'tk', 'gu')
  local is_simple = tonumber(got[1]) == record.committed and not (got[2] or got[3])
  if is_simple and redis.call('EXISTS', step.parked) == 0 then
    local slot, instance = take_spare(record.owner or '', model, record.version)
    if slot then
      tally_slot_wait(model, record.version, 'page', 0)
      local epoch = seat(step, model, record.version, tenant, record.owner, slot, instance)
      return { owner = record.owner, instance = instance, slot = slot, epoch = epoch }
    end
  end
  redis.call('HSET', step.record, 'st', 'm', 'be', line_up(step.sid, 'r', record.version, '0', tenant))
end

-- The fields of a record that every step needs; the last two only a step with a digest. A field that is absent costs
-- most, because Redis looks for it in the whole record.
local NEEDED = { 'st', 'ow', 'in', 'sl', 'ep', 'nx', 'cm', 'cl', 'sn', 'vr', 'bn', 'la', 'og', 'rd', 'ro' }

-- Why an open record accepts nothing but a START: its state is void, it was ended (`end`), or its END was accepted.
local function cause_of_close(step, start)
  local got = redis.call('HMGET', step.record, 'vd', 'vk', 'en')
  return got[1] and number(got[1]) >= start and void_kind(got[2]) or ended_as(got[3], start) or 'e'
end

-- The STARTs before the one that is being accepted, as far as steps behind them are open: a new owner numbers those by
-- them.
local function earlier_starts(step, record)
  local starts = {}
  for one in string.gmatch((redis.call('HGET', step.record, 'es') or '') .. ' ' .. record.start, '%d+') do
    if tonumber(one) <= record.committed then starts = {} end
    starts[#starts + 1] = one
  end
  return table.concat(starts, ' ')
end

local function submit(step, flags)
  local got = redis.call('HMGET', step.record, unpack(NEEDED, 1, step.digest == '' and #NEEDED - 2 or #NEEDED))
  local state = got[1]
  local begins = has(flags, START)
  if not state then
    if not (begins or has(flags, IMPLICIT)) then return { NEVER_SEEN, 0 } end
    -- Without a record they are of a sequence whose record was removed, not ended: they must not become this one's.
    if redis.call('EXISTS', step.parked, checkpoint_of(step.sid)) > 0 then error(NOT_SOUND) end
    return create(step, flags, 0, '')
  end
  local record = { state = state, owner = got[2], instance = got[3], slot = got[4], epoch = got[5],
    accepted = tonumber(got[6]), committed = tonumber(got[7]), closed = got[8] == '1', start = tonumber(got[9]),
    version = got[10], birth = got[11] or '', latest = got[12], orphaned = got[13], ids = '', last_step = 0, cause = nil,
    may_have_come = false }
  if not is_sound(state, record.accepted, record.committed, record.start, record.version)
    or state == 'l' and not is_placed(record.owner, record.instance, record.slot, record.epoch) then
    error(NOT_SOUND)
  end
  local recent, older = got[14] or '', got[15] or ''
  record.ids = older .. recent
  local last_step = math.max(0, record.accepted - record.start + 1)
  record.last_step = last_step
  record.cause = GONE[state] and state or record.closed and cause_of_close(step, record.start)
  record.may_have_come = may_have_come(step, record.latest)
  -- Retries first, by digest and then by number: a retry is answered whatever state its sequence is in now.
  local named = by_name(step, flags, record)
  if named then return repeated(step, named, record, ANSWERED) end
  -- A late call to the record before this one.
  local before = has(flags, NAMED) and redis.call('HGET', step.record, 'rp')
  if before and step_named(before, step.digest, 0) then return { ANSWERED, last_step } end
  local known = step.expected ~= '' and by_number(step, flags, record)
  if known then return known end
  -- To accept it now could run it twice.
  if record.may_have_come and not is_surely_new(step, record) then return { LATE, last_step } end
  if GONE[state] then
    if begins or has(flags, IMPLICIT) then return create(step, flags, last_step, record.ids) end
    return { GONE[state], last_step }
  end
  if record.closed and not (begins or has(flags, IMPLICIT)) then return { GONE[record.cause], last_step } end
  if record.accepted - record.committed >= OPEN_MAX then return { BUSY, last_step } end
  -- With an open step a sequence is not idle, so its marker gets no end until `commit` sets it again.
  if record.accepted == record.committed and redis.call('PERSIST', step.idle) == 0 then
    -- The marker has run out, and the scheduler has not ended the sequence yet. A START goes on with its record and
    -- slot.
    if not (begins or has(flags, IMPLICIT)) then return { EXPIRED, last_step } end
    flags, begins = bit.bor(flags, START), true
    redis.call('SET', step.idle, '1')
  end
  if record.closed and not begins then flags, begins = bit.bor(flags, START), true end
  local n = record.accepted + 1
  local change = { 'nx', n, 'la', accepted_now(step.gateway, step.token) }
  if begins then
    append(change, 'sn', n)
    if record.accepted > record.committed then append(change, 'es', earlier_starts(step, record)) end
  end
  if has(flags, END) then append(change, 'cl', 1) elseif begins then append(change, 'cl', 0) end
  remember(step.digest, n, recent, older, record.committed, change)
  redis.call('HSET', step.record, unpack(change))
  if record.orphaned then redis.call('HDEL', step.record, 'og') end
  local run = record.birth .. '.' .. (begins and n or record.start)
  local extra, cut_off = nil, nil
  if begins and not record.closed then extra, cut_off = '', record.birth .. '.' .. record.start end
  local place = state == 'l' and record or state == 'p' and return_from_page(step, record)
  if place then
    deliver(step.at, step.sid, place.owner, n, flags, place.epoch, place.instance, place.slot, record.committed,
      record.version)
    return { DELIVERED, n, run, extra, cut_off }
  end
  park(step, n, flags, record.version)
  if state == 'w' and tonumber(step.timeout) > 0 then lower_deadline(step, record) end
  return { WAITING, n, run, extra, cut_off }
end

-- Accepts a step of which nothing has to be judged: it follows in a live sequence, and comes for the first time. Most
-- steps do, so `submit` is not asked, which takes twice as long. nil for every other step; nothing is changed then.
local function follow(record, sid, at)
  local flags, digest, expected = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
  if has(flags, START + MORE) then return nil end
  local state, owner, instance, slot, epoch, accepted, committed, closed, start, version, birth, _, orphaned, recent,
    older = unpack(redis.call('HMGET', record, unpack(NEEDED, 1, digest == '' and #NEEDED - 2 or #NEEDED)))
  if state ~= 'l' or closed ~= '0' or orphaned then return nil end
  recent, older = recent or '', older or ''
  local taken, done = tonumber(accepted), tonumber(committed)
  if not (is_sound(state, taken, done, tonumber(start), version) and is_placed(owner, instance, slot, epoch))
    or expected ~= '' and start + expected ~= taken + 2
    or digest ~= '' and (string.find(recent, digest, 1, true) or string.find(older, digest, 1, true))
    or taken - done >= OPEN_MAX
    or has(flags, NAMED) and redis.call('HEXISTS', record, 'rp') == 1
    or taken == done and redis.call('PERSIST', idle_of(sid)) == 0 then return nil end
  local n = taken + 1
  -- Lua's own way to write a number takes three times as long.
  local name = string.format('%d', n)
  local change = { 'nx', name, 'la', accepted_now(ARGV[at + 4], ARGV[at + 5]) }
  if has(flags, END) then append(change, 'cl', 1) end
  remember(digest, n, recent, older, done, change)
  redis.call('HSET', record, unpack(change))
  deliver(at, sid, owner, name, ARGV[at], epoch, instance, slot, committed, version)
  return { DELIVERED, n, (birth or '') .. '.' .. start }
end

local FIELDS, ALL_FIELDS = 7, 12

-- Accepts or refuses a step. at: of its flags in ARGV, where its other arguments follow
local function accept(record, at)
  local sid = id_of(record)
  local reply = follow(record, sid, at)
  if reply then return reply end
  local flags, timeout, since, tenant, tenant_max, prefers = tonumber(ARGV[at]), '0', '-1', '', '0', ''
  if has(flags, MORE) then
    flags = flags - MORE
    timeout, since, tenant, tenant_max, prefers = unpack(ARGV, at + FIELDS, at + ALL_FIELDS - 1)
  end
  return submit({ at = at, record = record, idle = idle_of(sid), parked = parked_of(sid), sid = sid,
    digest = ARGV[at + 1], expected = ARGV[at + 2], version = ARGV[at + 3], gateway = ARGV[at + 4], token = ARGV[at + 5],
    message = ARGV[at + 6], timeout = timeout, since = tonumber(since), tenant = tenant, tenant_max = tenant_max,
    prefers = prefers }, flags)
end

-- each call
WAITING_MAX, OPEN_MAX, REMEMBERED = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
LIVE_MAX, JOINED_MAX, GAVE_WAY = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
now_text = nil
local replies, at = {}, 7
for i, record in ipairs(KEYS) do
  local done, reply = for_one(record, accept, record, at)
  -- If the record could not be read, the sequence is lost now, and the second try finds the tombstone: the step is
  -- refused, or begins a new sequence.
  replies[i] = done and reply or accept(record, at)
  at = at + (has(tonumber(ARGV[at]), MORE) and ALL_FIELDS or FIELDS)
end
tally_all()
send_answers()
return replies
