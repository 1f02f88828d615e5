-- Takes the batch at the front of a queue, if it certainly runs now; otherwise describes the front.
-- It certainly runs now if there is nothing to wait for, or the front has waited long enough, or no more rows fit.
-- Preferred sizes and a model's own batch strategy are not known here: the executor decides, and takes with
-- `work_take`.
--
-- KEYS   the queue (shared/store/lua/work.lua)   11 tally of the model version
-- ARGV   1 executor   2 tag of this take
--        3 most requests, 0: only apply the timeout policies and tell the next deadline
--        4 most rows   5 delay us
--        6 may take: 0 never, 1 when the front is late, 2 when it is late or no more fits (or there is no delay)
--        7 answer of requests that are too late
-- reply  { 1, requests left in the queue, id, message, id, message, ... } taken;
--        { 0, requests in the queue, us until the next deadline (-1: none), now us, id, rows, arrived us, shape, ... } not taken:
--        the front, with one request more than fits, if there is one
-- atomic a request is taken by one executor; the same tag gets the same again

local keys, now = work_keys(1), now_us()
local executor, tag, most, rows_max = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local delay, may_take = tonumber(ARGV[5]), tonumber(ARGV[6])

local function finish(reply)
  send_answers()
  tally_all()
  return reply
end

local again = taken_before(keys, executor, tag)
if again then return { 1, redis.call('ZCARD', keys.queue), unpack(again) } end
local has_deadlines = expire(keys, now, ARGV[7])
local function deadline() return next_deadline(keys, now, has_deadlines) end
if most == 0 then return finish({ 0, redis.call('ZCARD', keys.queue), deadline(), now }) end

-- Whether requests are in the empty queue again: a key was removed from Redis that says where they are, or who holds
-- them.
local function is_lacking()
  local held = redis.call('HLEN', keys.held)
  if redis.call('HLEN', keys.meta) <= held and (held == 0 or redis.call('EXISTS', keys.takers) == 1) then return false end
  requeue_all(keys)
  return redis.call('EXISTS', keys.queue) == 1
end

-- Reads the front of the queue. False if it is to be read again: requests in it could not be read and have left it, or
-- some have come back.
local members, ids, metas = {}, {}, {}
local function look()
  members, ids = redis.call('ZRANGE', keys.queue, 0, most), {}
  if #members == 0 then return not is_lacking() end
  for i, member in ipairs(members) do ids[i] = id_in(member) end
  metas = redis.call('HMGET', keys.meta, unpack(ids))
  local is_readable = true
  for i, member in ipairs(members) do
    local meta = meta_of(metas[i])
    if not meta or member_of(meta, ids[i]) ~= member then
      is_readable = false
      give_up_unreadable(keys, ids[i], member)
    elseif meta.arrived > now then
      -- The clock was set back since: until it is there again nobody could tell how long this has waited. Long enough.
      meta.arrived = now - delay
    end
    metas[i] = meta
  end
  return is_readable
end
while not look() do end
if #members == 0 then return finish({ 0, 0, -1, now }) end

-- How many requests fit into a batch; closed: the next one does not fit, or has another shape.
local count, rows, closed = 0, 0, false
for i, meta in ipairs(metas) do
  if i > most or i > 1 and (rows + meta.rows > rows_max or meta.shape ~= metas[1].shape) then
    closed = true
    break
  end
  count, rows = i, rows + meta.rows
end
local late = delay > 0 and now - metas[1].arrived >= delay
if may_take > 0 and (late or may_take == 2 and (delay == 0 or closed or rows >= rows_max)) then
  for i = #ids, count + 1, -1 do
    ids[i], members[i] = nil, nil
  end
  local messages, left = hold(keys, executor, tag, ids, members, has_deadlines)
  return finish({ 1, left, unpack(messages) })
end
local seen = { 0, redis.call('ZCARD', keys.queue), deadline(), now }
for i, id in ipairs(ids) do
  local meta = metas[i]
  seen[#seen + 1] = id
  seen[#seen + 1] = meta.rows
  seen[#seen + 1] = meta.arrived
  seen[#seen + 1] = meta.shape
end
return finish(seen)
