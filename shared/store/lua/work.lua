-- Prelude of the scripts of stateless work: one queue per model version, which every executor of it serves.
--
-- queue      sorted set, all scores 0, so ordered by member: `<level>.<1: delayed>.<number>.<id>`, the order in which
--            the requests run
-- meta       hash: id -> `<place> <arrived us> <deadline us, 0: none> <action R or D> <rows> <ordered 0 or 1>
--            <executors lost with it>[/<answers written>] <shape>`; action C: its callers have gone while it was run
-- messages   hash: id -> encoded InferMessage; meta and message stay until the request is answered
-- held       hash: id -> executor that runs it; such a request is not in the queue
-- takers     hash: executor -> `<tag> <id> <id> ...`, what its latest take got: a repeated take gets the same again
-- deadlines  sorted set: id -> deadline, us, of the requests in the queue that have one
-- number     string: counts the arrivals
-- wake       list of at most one token, which wakes an idle executor
-- order      sorted set: id -> number, where answers leave in the order of arrival
-- early      hash: id -> answer that is held back for the order
-- An id is `<gateway>/<token>`. It says where the answer goes, and a request that is sent again is recognised by it.

-- A place is `<level>.<delayed>.<number>`, of widths 20, 1 and 16.
local WORK_KEYS = 10
local PLACE_LENGTH = 39
local META = '^(%S+) (%S+) (%S+) (%S) (%d+) (%d) (%d+)/?(%d*) ?(.*)$'

local function work_keys(index)
  local k = (index - 1) * WORK_KEYS
  return { queue = KEYS[k + 1], meta = KEYS[k + 2], messages = KEYS[k + 3], held = KEYS[k + 4], takers = KEYS[k + 5],
    deadlines = KEYS[k + 6], number = KEYS[k + 7], wake = KEYS[k + 8], order = KEYS[k + 9], early = KEYS[k + 10] }
end

local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Reads an entry of meta; nil if it cannot be read.
local function meta_of(text)
  local place, arrived, deadline, action, rows, ordered, lost, sent, shape = string.match(text or '', META)
  if not (place and #place == PLACE_LENGTH and tonumber(arrived) and tonumber(deadline)) then return nil end
  return { place = place, arrived = tonumber(arrived), deadline = deadline, action = action, rows = tonumber(rows),
    ordered = ordered == '1', lost = tonumber(lost), sent = tonumber(sent) or 0, shape = shape }
end

local function meta_text(meta)
  return meta.place .. ' ' .. string.format('%.0f', meta.arrived) .. ' ' .. meta.deadline .. ' ' .. meta.action .. ' ' ..
    meta.rows .. ' ' .. (meta.ordered and '1' or '0') .. ' ' .. meta.lost ..
    (meta.sent > 0 and '/' .. meta.sent or '') .. ' ' .. meta.shape
end

local function member_of(meta, id)
  return meta.place .. '.' .. id
end

-- A member is the place (39 characters), a dot and the id.
local ID_AT = 41

local function id_in(member)
  return string.sub(member, ID_AT)
end

-- Wakes one idle executor. One token is enough: an executor that takes work and leaves some behind wakes the next.
local function wake(keys)
  if redis.call('LLEN', keys.wake) == 0 then redis.call('RPUSH', keys.wake, '1') end
end

-- Wakes the next idle executor if requests are left. Returns how many are left.
local function wake_next(keys)
  local left = redis.call('ZCARD', keys.queue)
  if left > 0 then wake(keys) else redis.call('DEL', keys.wake) end
  return left
end

-- -- answers ----------------------------------------------------------------------------------------------------------

local function send(id, reply)
  local gateway, token = string.match(id, '^(.*)/([^/]*)$')
  answer(gateway, token, reply)
end

-- Sends every answer that no earlier request holds back any more. An earlier request that has no meta cannot be
-- answered; its caller gets an error, so that it does not hold back the others for ever. Without any order, because its
-- key was removed, nothing holds an answer back.
local function send_ordered(keys)
  while true do
    local first = redis.call('ZRANGE', keys.order, 0, 0)[1]
    if not first then
      local early = redis.call('HGETALL', keys.early)
      for i = 1, #early, 2 do send(early[i], early[i + 1]) end
      redis.call('DEL', keys.early)
    end
    local reply = first and redis.call('HGET', keys.early, first)
    if first and not reply and redis.call('HEXISTS', keys.meta, first) == 0 then reply = unreadable_reply() end
    if not reply then return end
    send(first, reply)
    redis.call('ZREM', keys.order, first)
    redis.call('HDEL', keys.early, first)
  end
end

-- Gives up a request that no executor holds: it leaves every key, its caller gets the reply (nil: has gone) at once, and
-- it is counted as failed for this reason (shared/statistics/tally.py).
local function give_up(keys, id, meta, reply, reason)
  redis.call('ZREM', keys.queue, member_of(meta, id))
  redis.call('ZREM', keys.deadlines, id)
  redis.call('HDEL', keys.meta, id)
  redis.call('HDEL', keys.messages, id)
  if meta.ordered then redis.call('ZREM', keys.order, id) end
  if reply then send(id, reply) end
  if meta.ordered then send_ordered(keys) end
  tally_refused(KEYS[WORK_KEYS + 1], reason, math.floor((now_us() - meta.arrived) / 1000))
end

-- Gives up a request whose meta cannot be read. member: its member of the queue, if that is known
local function give_up_unreadable(keys, id, member)
  count_unreadable(keys.meta, id)
  if member then redis.call('ZREM', keys.queue, member) end
  for _, key in ipairs({ keys.deadlines, keys.order }) do redis.call('ZREM', key, id) end
  for _, key in ipairs({ keys.meta, keys.messages, keys.held, keys.early }) do redis.call('HDEL', key, id) end
  send(id, unreadable_reply())
  send_ordered(keys)
end

-- A taker that is dead is looked for among the takers, so each executor that holds something must stand there.
local function name_holders(keys)
  for _, holder in ipairs(redis.call('HVALS', keys.held)) do redis.call('HSETNX', keys.takers, holder, '') end
end

-- Puts a request that nobody holds back into its old place of the queue; true. If its callers have gone it is given up.
local function put_back(keys, id, meta)
  if meta.action == 'C' then
    give_up(keys, id, meta, nil, 'CANCELED')
    return false
  end
  redis.call('ZADD', keys.queue, 0, member_of(meta, id))
  return true
end

-- Rebuilds the queue, or its held requests, from the metas. A request that was being run may then run twice, but is
-- answered once.
local function requeue_all(keys)
  local all = redis.call('HGETALL', keys.meta)
  for i = 1, #all, 2 do
    local meta = meta_of(all[i + 1])
    if not meta then
      give_up_unreadable(keys, all[i])
    elseif redis.call('HEXISTS', keys.held, all[i]) == 0 then
      put_back(keys, all[i], meta)
    end
  end
  name_holders(keys)
end

-- What hangs on a key of the queue that was removed is made again.
local function mend(key)
  -- Behind the keys of the queues stands a tally of each, and the cache may follow.
  for i = 1, math.floor(#KEYS / (WORK_KEYS + 1)) do
    local keys = work_keys(i)
    if key == keys.queue or key == keys.held or key == keys.takers then requeue_all(keys) end
    if key == keys.order then send_ordered(keys) end
  end
end

-- -- deadlines --------------------------------------------------------------------------------------------------------

-- Requests whose deadlines one call handles, so that no call blocks Redis for long.
local EXPIRED_MAX = 128

-- Applies the timeout policy to late requests: REJECT answers a request; DELAY moves it, for good, behind the others of
-- its level. Returns whether a request in the queue has a deadline.
local function expire(keys, now, reply)
  if redis.call('EXISTS', keys.deadlines) == 0 then return false end
  local late = redis.call('ZRANGEBYSCORE', keys.deadlines, '-inf', string.format('%.0f', now), 'LIMIT', 0, EXPIRED_MAX)
  for _, id in ipairs(late) do
    local meta = meta_of(redis.call('HGET', keys.meta, id))
    if not meta then
      -- If it is in the queue, the executor that comes to it there gives it up.
      redis.call('ZREM', keys.deadlines, id)
    elseif meta.action == 'D' then
      redis.call('ZREM', keys.queue, member_of(meta, id))
      redis.call('ZREM', keys.deadlines, id)
      -- Character 22 of a place is the mark of a delayed request.
      meta.place = string.sub(meta.place, 1, 21) .. '1' .. string.sub(meta.place, 23)
      meta.deadline = '0'
      redis.call('ZADD', keys.queue, 0, member_of(meta, id))
      redis.call('HSET', keys.meta, id, meta_text(meta))
    else
      give_up(keys, id, meta, reply, 'REJECTED')
    end
  end
  return true
end

-- Microseconds until the next deadline in the queue, -1 if there is none.
local function next_deadline(keys, now, has_deadlines)
  if not has_deadlines then return -1 end
  local first = redis.call('ZRANGE', keys.deadlines, 0, 0, 'WITHSCORES')[2]
  return first and math.max(0, tonumber(first) - now) or -1
end

-- -- taking -----------------------------------------------------------------------------------------------------------

local function messages_of(keys, ids)
  local reply = {}
  if #ids == 0 then return reply end
  local messages = redis.call('HMGET', keys.messages, unpack(ids))
  for i, id in ipairs(ids) do
    reply[2 * i - 1] = id
    reply[2 * i] = messages[i] or ''
  end
  return reply
end

-- What an executor's take with this tag got before; nil if the take is new.
local function taken_before(keys, executor, tag)
  local taken = redis.call('HGET', keys.takers, executor)
  if not taken or string.sub(taken, 1, #tag + 1) ~= tag .. ' ' then return nil end
  local ids = {}
  for id in string.gmatch(string.sub(taken, #tag + 2), '%S+') do ids[#ids + 1] = id end
  return messages_of(keys, ids)
end

-- Moves requests from the queue to an executor.
local function hold(keys, executor, tag, ids, members, has_deadlines)
  local held = {}
  for i, id in ipairs(ids) do
    held[2 * i - 1] = id
    held[2 * i] = executor
  end
  -- Before the ZREM: if `held` cannot be read, it is rebuilt here (`requeue_all`), and that puts every request that is
  -- not held into the queue, these too.
  redis.call('HSET', keys.held, unpack(held))
  redis.call('ZREM', keys.queue, unpack(members))
  if has_deadlines then redis.call('ZREM', keys.deadlines, unpack(ids)) end
  -- Its first take; or the key was removed, and with it who else holds requests.
  if redis.call('HSET', keys.takers, executor, tag .. ' ' .. table.concat(ids, ' ')) == 1 then name_holders(keys) end
  return messages_of(keys, ids), wake_next(keys)
end

-- each call
on_removed = mend
