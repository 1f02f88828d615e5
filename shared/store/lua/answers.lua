-- Writes answers of open steps that are not their last ones: the steps of decoupled models. An executor that is not the
-- owner is refused. An answer whose number was written before is left out, so an executor that runs the step again after
-- a takeover writes none twice.
--
-- KEYS   per step: record
-- ARGV   1 executor   2 bytes of a step's answers that are kept for a retry: beyond it the oldest go
--        per step: epoch, step, gateway, token, 1 to keep the answers for a retry, number of answers,
--                  per answer: its number (from 1, rising), reply
-- reply  per step: 1 written, 0 refused
-- atomic everything of one step. The answers for one gateway leave together, in as few entries as possible. The last
--        answer of a step is written by `commit`.

local EXECUTOR, KEPT_BYTES

-- Sends an answer to the first caller, and to all that asked again (field j).
local function send(step, joined, reply)
  if step.gateway ~= '' then answer(step.gateway, step.token, reply) end
  for gateway, token in string.gmatch(joined, '(%S+) (%S+);') do answer(gateway, token, reply) end
end

-- Makes room: the oldest kept answers go. Returns the first one that is kept, and the bytes that are left.
local function trimmed(record, step, first, last, bytes)
  while bytes > KEPT_BYTES and first <= last do
    local field = answer_field(step.name, first)
    bytes = bytes - redis.call('HSTRLEN', record, field)
    redis.call('HDEL', record, field)
    first = first + 1
  end
  return first, bytes
end

local function write(record, step)
  local got = redis.call('HMGET', record, 'st', 'ep', 'ow', 'cm', 'j:' .. step.name)
  if got[1] ~= 'l' or tonumber(got[2]) ~= step.epoch or got[3] ~= EXECUTOR or tonumber(got[4]) ~= step.n - 1 then
    return 0
  end
  local count, first, bytes = answers_of(record, step.n)
  local before, change = count, {}
  for a = step.answers, step.answers_end, 2 do
    local nth, reply = tonumber(ARGV[a]), ARGV[a + 1]
    if nth > count then
      if nth > count + 1 then
        -- Redis was restarted with older data, and the answers between are lost: none before this one can be kept.
        for old = first, count do redis.call('HDEL', record, answer_field(step.name, old)) end
        first, bytes = nth, 0
      end
      if not step.keep then first = nth + 1 end
      count = nth
      if step.keep then
        append(change, answer_field(step.name, nth), reply)
        bytes = bytes + #reply
      end
      send(step, got[5] or '', reply)
    end
  end
  if count == before then return 1 end
  for fields, from, to in pieces(change) do redis.call('HSET', record, unpack(fields, from, to)) end
  first, bytes = trimmed(record, step, first, count, bytes)
  redis.call('HSET', record, 'an', step.name .. ' ' .. count .. ' ' .. first .. ' ' .. bytes)
  return 1
end

-- each call
EXECUTOR, KEPT_BYTES = ARGV[1], tonumber(ARGV[2])
local results, a = {}, 3
for i = 1, #KEYS do
  local step = { epoch = tonumber(ARGV[a]), n = tonumber(ARGV[a + 1]), name = ARGV[a + 1], gateway = ARGV[a + 2],
    token = ARGV[a + 3], keep = ARGV[a + 4] == '1', answers = a + 6, answers_end = a + 5 + 2 * ARGV[a + 5] }
  a = step.answers_end + 1
  local done, result = for_one(KEYS[i], write, KEYS[i], step)
  results[i] = done and result or 0
end
send_answers()
return results
