-- Makes the steps of one batch final: checkpoint, step number, reply. An executor that is not the owner is refused.
--
-- KEYS   1 inbox   2 owned sequences   3 deadlines of the model   4 feed of the model
--        5 tally of the model version   6 number of slots that the leader wants freed   7 counts of the waiting line
--        per step: the record of its sequence
-- ARGV   1 idle ms   2 tombstone ms   3 executor   4 replies of a sequence that are kept for a retry
--        5 bytes of all kept replies but the newest, which is kept whatever its size
--        6 model version   7 mark of the load that ran the steps, '' if there is none
--        8 steps of a run that its journal may hold, 0 if the model keeps none   9 bytes of these steps together
--        10 number of executions' packed counts, and these counts (counted by the first call that commits any of the
--          steps)
--        per step: epoch, step,
--                  flags (1 START, 2 END, 16 the sequence consists of this one request, 64 its model is decoupled,
--                  256 what most steps leave out follows, 512 its reply is kept for a retry),
--                  gateway, token, reply, packed counts,
--                  number of inbox entries to remove, these entry ids,
--                  number of checkpoint fields and values (0: the state did not change), these fields and values,
--        with 256: outcome (0 done, 1 the model failed, 2 void, 3 cancelled before it ran, 4 given up,
--                  5 the state is lost: the later steps are void until a START),
--                  base: the step after which a takeover replays from now on (0: as before); without 256 it is this
--                  step if inbox entries are removed, else 0,
--                  1 a takeover finds the state from now on, 0 it does not any more, '' as before,
--                  1 no other field of the checkpoint before it stays, else 0
--        if the model keeps journals: the step's own inbox entry
-- reply  per step: 1 committed
--                  2 committed, and the sequence is over
--                  3 committed, and the sequence is paged: other sequences wait for its slot, it has no other step, and
--                    its state is in its checkpoint
--                  0 was committed before
--                 -1 refused
--                 -2 not the step after the last committed one (a fault of the executor; nothing was changed)
-- atomic everything of one step. The replies for one gateway leave together, in as few entries as possible.

-- Three times what a gateway waits for Redis to come back.
local RESENT_WITHIN_MS = 30000
-- Flag of a step whose reply is kept.
local KEPT = 512
-- Flags of a step of which something has to be judged: it is the first or the last one, has further answers, or did not
-- go as most do.
local TO_BE_JUDGED = START + END + ALONE + STREAMED + MORE
local EXECUTOR, REPLIES, REPLY_BYTES, MARK, JOURNAL_STEPS, JOURNAL_BYTES
-- Why the sequence is void (field vk), by the outcome of the step that lost the state; outcomes 1 and 2 only of a START,
-- and 1 of a sequence that follows another.
local VOID_KINDS = { 'f', 'f', 'c', 'o', 'o' }

-- Answers the first caller and every caller that asked again.
local function answer_all(keys, step)
  if step.gateway ~= '' then answer(step.gateway, step.token, step.reply) end
  if step.joined then
    for gateway, token in string.gmatch(step.joined, '(%S+) (%S+);') do
      answer(gateway, token, step.reply)
    end
    redis.call('HDEL', keys.record, 'j:' .. step.name, 'a:' .. step.name)
  end
end

-- Adds the reply to the kept ones, with the answers of a decoupled model before it; the oldest give way.
-- list: the kept replies (field rk); change: fields and values to be written to the record, which this extends
local function keep_reply(record, n, name, reply, is_streamed, list, change)
  local count, bytes, gone = 1, 0, {}
  for size in string.gmatch(list, ':(%d+)') do
    count, bytes = count + 1, bytes + size
  end
  while list ~= '' and (count > REPLIES or bytes > REPLY_BYTES) do
    local oldest, size, first, last, rest = string.match(list, '^(%d+):(%d+)/?(%d*)/?(%d*) ?(.*)')
    gone[#gone + 1] = 'p:' .. oldest
    first, last = tonumber(first), tonumber(last) or 0
    if first then check_answers(record, first, last) end
    for i = first or 1, last do gone[#gone + 1] = answer_field(oldest, i) end
    list, count, bytes = rest, count - 1, bytes - size
  end
  for fields, from, to in pieces(gone) do redis.call('HDEL', record, unpack(fields, from, to)) end
  local entry = name .. ':' .. #reply
  if is_streamed then
    local written, first, size = answers_of(record, n)
    if written > 0 then entry = name .. ':' .. #reply + size .. '/' .. first .. '/' .. written end
  end
  append(change, 'rk', list == '' and entry or list .. ' ' .. entry)
  append(change, 'p:' .. name, reply)
end

-- Only cancelled steps that are still to come are remembered.
local function forget_cancelled(keys, list, n)
  if not list then return end
  local left = {}
  for one in string.gmatch(list, '%d+') do
    if tonumber(one) > n then left[#left + 1] = one end
  end
  if #left > 0 then
    redis.call('HSET', keys.record, 'ca', table.concat(left, ' '))
  else
    redis.call('HDEL', keys.record, 'ca')
  end
end

-- A step that failed must not run again in a replay, where it could succeed. Ranges, because many steps in a row can
-- fail.
local function append_failed(list, n)
  local before, first, last = string.match(list or '', '^(.-)(%d+)%-(%d+)$')
  if tonumber(last) == n - 1 then return before .. first .. '-' .. n end
  return (list and list .. ' ' or '') .. n .. '-' .. n
end

-- What the steps of this call have in common is written at its end, for all of them at once: the inbox entries that are
-- removed, and the deadlines (score and sequence) that are set unless an earlier one stands.
local removed, deadlines

local function remove_entries(from, to)
  for at = from, to do removed[#removed + 1] = ARGV[at] end
end

-- Writes the parts of a state that have changed, which ARGV has from `from` to `to`.
local function write_checkpoint(sid, name, from, to)
  if from > to then return end
  local checkpoint = checkpoint_of(sid)
  -- In pieces: the first checkpoint of a long state has thousands of parts.
  for piece = from, to, PIECE do
    -- The step's number lies with the state: a new owner sees which step the state follows.
    redis.call('HSET', checkpoint, 'n', name, unpack(ARGV, piece, math.min(piece + PIECE - 1, to)))
  end
end

-- Notes from which step a takeover replays, which steps failed, and whether a takeover finds the state; removes the
-- inbox entries that no replay needs. change: as above
local function advance(keys, step, failed, change)
  if step.base > 0 then
    append(change, 'ck', step.base)
    if failed then redis.call('HDEL', keys.record, 'fl') end
  elseif step.outcome == 1 then
    append(change, 'fl', append_failed(failed, step.n))
  end
  if step.recoverable ~= '' then append(change, 'du', step.recoverable) end
  remove_entries(step.entries, step.entries_end)
end

-- How long the tombstone stays. If the gateway made the sequence's id for one request, no client asks for it again.
-- Only the gateway itself may send the request again, and only if the client gave it a request id.
local function tombstone_ms(step)
  if not has(step.flags, ALONE) then return ARGV[2] end
  return step.keep and math.min(tonumber(ARGV[2]), RESENT_WITHIN_MS) or 0
end

-- Adds a step that the model ran to the journal of its sequence: the request, which still lies in the inbox, and the
-- reply. A journal is always a beginning of the run since its START: behind a step that has no room in it, or that came
-- while the model kept none, nothing is added any more.
local function add_to_journal(keys, step)
  local journal, begins = journal_of(step.sid), has(step.flags, START)
  local run, bytes = nil, 0
  if begins then
    redis.call('UNLINK', journal)
    run = (redis.call('HGET', keys.record, 'bn') or '') .. '.' .. step.name
  else
    local got = redis.call('HMGET', journal, 'run', 'n', 'b')
    if tonumber(got[2]) ~= step.n - 1 then return end
    run, bytes = got[1] or '', number(got[3])
  end
  local entry = redis.call('XRANGE', keys.inbox, step.entry, step.entry)[1]
  local request = entry and fields_of(entry).m
  if not request then return end
  bytes = bytes + #request + #step.reply
  if bytes > JOURNAL_BYTES or step.n - number(string.match(run, '%.(%d+)$')) >= JOURNAL_STEPS then return end
  redis.call('HSET', journal, 'run', run, 'n', step.name, 'b', bytes, 'i:' .. step.name, request, 'o:' .. step.name,
    step.reply)
  if has(step.flags, END) then redis.call('HSET', journal, 'e', 1) end
end

-- Sets the idle marker, and the time at which the leader looks at it.
local function mark_idle(idle, sid, ms)
  redis.call('SET', idle, '1', 'PX', ms)
  append(deadlines, clock_ms() + ms, sid)
end

-- Starts the idle time, as no step is open any more. grace_ms: the shorter time of an orphaned sequence
local function begin_idle_time(keys, sid, idle_ms, grace_ms)
  if grace_ms then
    redis.call('HSET', keys.record, 'og', clock_ms() + idle_ms)
    idle_ms = math.min(idle_ms, tonumber(grace_ms))
    look_by(sid, clock_ms() + idle_ms)
  end
  mark_idle(keys.idle, sid, idle_ms)
end

-- Number of slots that the leader wants freed; each sequence that is paged takes one from it.
local wanted

local function slots_wanted()
  wanted = wanted or number(string.match(redis.call('GET', KEYS[6]) or '', '^%d+$'))
  return wanted
end

local function is_slot_wanted()
  if slots_wanted() <= 0 then return false end
  wanted = redis.call('DECR', KEYS[6])
  return true
end

-- Whether a takeover finds the state after this step without a replay.
local function is_checkpointed(keys, step)
  return (step.base > 0 and step.base or number(redis.call('HGET', keys.record, 'ck'))) == step.n
end

-- How many steps were refused.
local refused
-- Whether this call makes any step final, and whether a call before it did so with one of the same steps.
local commits, has_committed

-- Whether the record is damaged, so that the sequence must be ended as lost.
local function is_unreadable(keys, step, got, epoch, accepted, committed, start)
  -- No record, but the owner's set names the sequence: the record was removed without an end of the sequence.
  if not got[1] then return redis.call('SREM', keys.owned, step.sid) == 1 end
  if not is_sound(got[1], accepted, committed, start, got[8]) then return true end
  -- A record with another owner or a lower epoch than the caller's, while the caller's set still names the sequence:
  -- both change together, and epochs only grow, so the record is wrong.
  if got[1] ~= 'l' or got[5] == EXECUTOR and (epoch or -1) >= step.epoch then return false end
  return redis.call('SISMEMBER', keys.owned, step.sid) == 1
end

-- Removes what a refused step's sequence has left in the inbox for a replay, if it is over: so it was when its owner
-- asked again for a commit whose reply was lost, and heard of the end too late. With END nothing is left. If the
-- sequence was lost at another owner, somebody may still wait for a step; no gateway knows a caller that was answered.
local function remove_left(keys, step, state)
  local first = tonumber(redis.call('HGET', keys.record, 'fe'))
  -- An epoch before the first one is that of an earlier sequence of the id.
  local is_over = not state or TOMBSTONES[state] or step.epoch < (first or math.huge)
  if has(step.flags, END) or not is_over then return end
  for _, left in ipairs(steps_in(keys.inbox, step.sid)) do
    if left.epoch <= step.epoch then
      removed[#removed + 1] = left.entry
      answer(left.gateway, left.token, lost_reply())
    end
  end
end

local function commit(keys, step)
  local got = redis.call('HMGET', keys.record, 'st', 'ep', 'nx', 'cm', 'ow', 'sn', 'vd', 'vr', 'j:' .. step.name, 'ca', 'fl',
    'pg', 'og', step.keep and 'rk' or 'st')
  local epoch, accepted, committed, start = tonumber(got[2]), tonumber(got[3]), tonumber(got[4]), tonumber(got[6])
  if is_unreadable(keys, step, got, epoch, accepted, committed, start) then error(NOT_SOUND) end
  -- Only the owner of an epoch commits in it, so what is committed in this epoch was committed by this executor. The
  -- record of a one-request sequence may be removed as soon as it is over.
  local before = epoch == step.epoch and step.n <= committed or not got[1] and has(step.flags, ALONE)
  has_committed = has_committed or before
  if epoch ~= step.epoch or got[5] ~= EXECUTOR then
    -- A commit that ended the sequence and was sent again is no commit of a former owner.
    if not before then refused = refused + 1 end
    remove_left(keys, step, got[1])
    return -1
  end
  if got[1] == 'p' and before then return 3 end
  if got[1] ~= 'l' then return -1 end
  if before then return 0 end
  if step.n ~= committed + 1 then
    return -2
  end
  -- Redis was restarted with older data: it has not accepted this step, and may give its number to another one.
  if step.n > accepted then return -1 end
  commits = true
  step.joined = got[9]
  forget_cancelled(keys, got[10], step.n)

  local begins = has(step.flags, START) and step.outcome == 0
  -- A START needs no state from before it, not in a replay either; another load of the model may be unable to take it.
  if step.anew or begins and step.n > 1 then redis.call('UNLINK', keys.checkpoint) end
  write_checkpoint(step.sid, step.name, step.checkpoint, step.checkpoint_end)
  local change = { 'cm', step.name }
  advance(keys, step, got[11], change)
  if step.keep then
    keep_reply(keys.record, step.n, step.name, step.reply, has(step.flags, STREAMED), got[14] or '', change)
  end
  if MARK ~= '' and begins then append(change, 'mk', MARK) end
  redis.call('HSET', keys.record, unpack(change))
  if JOURNAL_STEPS > 0 and step.outcome <= 1 and not has(step.flags, ALONE) then add_to_journal(keys, step) end
  if has(step.flags, STREAMED) then redis.call('HDEL', keys.record, 'an') end
  answer_all(keys, step)
  tally(KEYS[5], step.counts)

  local void, kind = got[7], nil
  -- A sequence that follows another is behind it for good when a step fails that the other one has done.
  local is_fatal = has(step.flags, START) or step.outcome == 1 and follows_another(step.sid)
  if step.outcome >= 3 or step.outcome ~= 0 and is_fatal then
    void, kind = step.n, VOID_KINDS[step.outcome]
    lose_state(keys.record, void, kind, start)
  elseif void and begins then
    redis.call('HDEL', keys.record, 'vd', 'vk')
    void = nil
  end
  -- Other steps are open: the sequence neither ends nor becomes idle with this one.
  if accepted > step.n then return 1 end
  if has(step.flags, END) or void then
    kind = void and (kind or void_kind(redis.call('HGET', keys.record, 'vk'))) or 'e'
    release(keys, step.sid, kind, step.epoch, got[8], tombstone_ms(step))
    return 2
  end
  begin_idle_time(keys, step.sid, tonumber(ARGV[1]), got[13])
  -- is_slot_wanted last, because it takes a slot off the wanted ones.
  if not (got[12] and is_checkpointed(keys, step) and is_slot_wanted()) then return 1 end
  page(keys.record, KEYS[7], got[8])
  redis.call('SREM', keys.owned, step.sid)
  redis.call('XADD', keys.feed, '*', 'q', step.sid, 'e', step.epoch, 'k', 'p')
  return 3
end

-- Makes a step final of which nothing has to be judged: the model ran it in the midst of a sequence, one caller waits
-- for it, and no later step is open. Most steps are so, and `commit` is not asked, which takes twice as long. nil for
-- every other step; nothing is changed then.
-- at: of the step's first argument in ARGV; the other arguments: where further ones stand there
local function conclude(record, at, entries, entries_end, checkpoint, checkpoint_end)
  local name, flags = ARGV[at + 1], tonumber(ARGV[at + 2])
  if has(flags, TO_BE_JUDGED) or JOURNAL_STEPS > 0 then return nil end
  local keep = has(flags, KEPT)
  local state, epoch, accepted, committed, owner, start, void, version, joined, cancelled, failed, orphaned, pageable,
    kept = unpack(redis.call('HMGET', record, 'st', 'ep', 'nx', 'cm', 'ow', 'sn', 'vd', 'vr', 'j:' .. name, 'ca',
      'fl', 'og', 'pg', keep and 'rk' or 'st'))
  if state ~= 'l' or epoch ~= ARGV[at] or owner ~= EXECUTOR or accepted ~= name
    or void or joined or cancelled or failed or orphaned or pageable and slots_wanted() > 0 then return nil end
  local n, done = tonumber(name), tonumber(committed)
  if not is_sound(state, n, done, tonumber(start), version) or n ~= done + 1 then return nil end
  commits = true
  local sid, reply = id_of(record), ARGV[at + 5]
  write_checkpoint(sid, name, checkpoint, checkpoint_end)
  local change = { 'cm', name }
  if entries <= entries_end then append(change, 'ck', name) end
  if keep then keep_reply(record, n, name, reply, false, kept or '', change) end
  redis.call('HSET', record, unpack(change))
  mark_idle(idle_of(sid), sid, ARGV[1])
  remove_entries(entries, entries_end)
  if ARGV[at + 3] ~= '' then answer(ARGV[at + 3], ARGV[at + 4], reply) end
  tally(KEYS[5], ARGV[at + 6])
  return 1
end

-- Makes a step final; returns the reply code. Arguments as of `conclude`; more: where those stand that most steps leave
-- out, if they are there; entry: the step's own inbox entry, if the model keeps journals
local function finish(record, at, entries, entries_end, checkpoint, checkpoint_end, more, entry)
  local code = conclude(record, at, entries, entries_end, checkpoint, checkpoint_end)
  if code then return code end
  local keys, flags = sequence_keys(record), tonumber(ARGV[at + 2])
  keys.inbox, keys.owned, keys.deadlines, keys.feed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local outcome, base, recoverable, anew = '0', entries <= entries_end and ARGV[at + 1] or '0', '', '0'
  if more then outcome, base, recoverable, anew = unpack(ARGV, more, more + 3) end
  return commit(keys, { sid = id_of(record), epoch = tonumber(ARGV[at]), n = tonumber(ARGV[at + 1]), name = ARGV[at + 1],
    flags = flags, outcome = tonumber(outcome), gateway = ARGV[at + 3], token = ARGV[at + 4], reply = ARGV[at + 5],
    keep = has(flags, KEPT), counts = ARGV[at + 6], base = tonumber(base), recoverable = recoverable, entries = entries,
    entries_end = entries_end, anew = anew == '1', checkpoint = checkpoint, checkpoint_end = checkpoint_end, entry = entry,
    joined = nil })
end

-- Where the reading of ARGV has come to.
local a

-- ARGV[a] says how many values follow: the places of the first and the last of them. a moves to the next argument.
local function counted()
  local first = a + 1
  a = first + ARGV[a]
  return first, a - 1
end

-- each call
EXECUTOR, REPLIES, REPLY_BYTES, MARK = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[7]
calling_executor = EXECUTOR
JOURNAL_STEPS, JOURNAL_BYTES = tonumber(ARGV[8]), tonumber(ARGV[9])
removed, deadlines, wanted, refused, commits, has_committed, a = {}, {}, nil, 0, false, false, 10
local executed, executed_end = counted()
local results = {}
for i = 1, #KEYS - 7 do
  local record, at, more, entry = KEYS[7 + i], a, nil, nil
  a = at + 7
  local entries, entries_end = counted()
  local checkpoint, checkpoint_end = counted()
  if has(tonumber(ARGV[at + 2]), MORE) then more, a = a, a + 4 end
  if JOURNAL_STEPS > 0 then entry, a = ARGV[a], a + 1 end
  local done, result = for_one(record, finish, record, at, entries, entries_end, checkpoint, checkpoint_end, more, entry)
  -- The sequence was lost because its record cannot be read. Its caller is told, unless `lose` knew it from the record.
  if not done then
    local gateway, token = ARGV[at + 3], ARGV[at + 4]
    redis.call('SREM', KEYS[2], id_of(record))
    if not result[gateway .. ' ' .. token] then answer(gateway ~= '' and gateway, token, lost_reply()) end
    remove_entries(entries, entries_end)
  end
  results[i] = done and result or -1
end
-- A call that is sent again repeats at least one committed step: then the executions were counted by the first call.
if commits and not has_committed then
  for at = executed, executed_end do tally(KEYS[5], ARGV[at]) end
end
for entries, from, to in pieces(removed) do redis.call('XDEL', KEYS[1], unpack(entries, from, to)) end
-- LT: an earlier deadline may stay, as `expire` looks at the marker and sets the deadline again. A later one is of a
-- longer idle time, or of a clock that was set back since.
for due, from, to in pieces(deadlines) do redis.call('ZADD', KEYS[3], 'LT', unpack(due, from, to)) end
count_line(KEYS[7], 'refused:' .. ARGV[6], refused)
tally_all()
send_answers()
return results
